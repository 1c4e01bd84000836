"""Inference: one engine, whose ranks share long prompts by any strategy."""
