"""Inference: models of transformers whose core attention the ranks share."""
