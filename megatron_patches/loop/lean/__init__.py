"""A lean training loop on megatron-core alone, with Megatron-LM's flags and log lines.

`training` is the loop, `config` makes megatron-core's configurations of the flags, `checkpointing`
saves and loads, `logs` writes log lines and TensorBoard files.
"""
