"""From text to Megatron's indexed token files."""
