"""A recording of what training and inference do, to the bit and event by event.

`launch/test.sh --recording [COMMIT]` trains tiny models for ten steps in some twenty mixes of
features, and answers prompts in fifteen, here and in a worktree of the commit with the commit's own
recorder. `python tests/recording make FILE` and `compare FILE FILE` are its parts, and `--mixes
NAME...` takes some mixes (`make --list` names them). Recordings of commits are kept in
`build/recording`.

A training mix records of each rank:

- the bits of losses, gradients and weights, and the learning rate, of every step;
- hashes of every tick's plans, as saved, and of the tokens of every micro-batch;
- bytes sent, received and planned by phase; core attention's buffers, and when they grow;
- new tensors of 4 KiB and more, by whether kernels, exchanges or all else made them. The first step
  is not counted, since some memory is allocated once;
- events in the order of the training thread: exchanges, waits for collectives, kernels with their
  rows, layers, the loss, what stages pass on, gradients and parameters; and for each tick or
  micro-batch whether it was made ahead, and on which thread.

A mix of inference records of each rank and step the tokens that are fed, hashes of plans, new
blocks, the bits of logits, keys and values, and the same events; at the end tokens, scores, bytes
and the blocks that are left. Where prefill and decode are apart, what happens between steps is left
out.

Times are not recorded, so two recordings of a commit are identical on the same processor and
versions; others are warned about. `hooks.py` wraps methods and notes their calls: when code moves,
re-point it (and the imports of `rank.py` and `inference.py`), keep its words, and leave the folder
where it is, since a commit's recorder is looked for there.
"""
