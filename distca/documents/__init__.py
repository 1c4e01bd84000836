"""Documents: distributions of their lengths, tokenizers, and Megatron's indexed datasets."""
