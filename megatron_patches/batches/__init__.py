"""From token files to a rank's input of each tick: its tokens, and its part of the plans.

`sources` builds the iterators of a run; `stream` orders the documents; `micro_batch` packs them as
plain Megatron does; `planned` has them planned for `--distca`; `ticks` makes the input of each
tick; `groups_of_one` warns of baselines that cannot shard documents.
"""
