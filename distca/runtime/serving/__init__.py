"""Execution of inference's plans, forward alone.

* keys and values: `kv_pool.py` a rank's blocks and tables, `kv_moves.py` blocks that change ranks;
* prefills: `step_exchange.py` is one rank's part of a plan in steps, `stepped_call.py` runs it, of
  scattered heads, too; `kept_exchange.py` and `kept_call.py` do so for plans that drop rows, by
  `importance.py`;
* decodes: `decode_exchange.py` sends queries to the ranks that hold keys of their sequences;
* rows of ranks that split the weights: `sequence_exchange.py`.
"""
