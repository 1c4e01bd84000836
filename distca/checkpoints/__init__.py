"""Checkpoints of Hugging Face: their tensors, and whether they are exactly those of the model."""
