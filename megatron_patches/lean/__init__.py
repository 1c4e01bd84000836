"""A lean training loop on megatron-core alone, with Megatron-LM's flags and log lines."""
