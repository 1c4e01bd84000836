"""From token files to a rank's input of each tick: its tokens, and its part of the plans.

`blends` and `dataset_factory` find the documents that the flags name, `stream` orders them, and
`resuming` says where a run goes on. A reader makes micro-batches of the stream, and an iterator has
them made ahead: `packed` without `--distca`; with it `planned` reads what the planner asks for, and
`ticks` has global batches planned and makes a rank's input of each tick.
"""
