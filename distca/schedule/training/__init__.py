"""Plans of a training step: its micro-batches, nano-batches and ticks, and the global batch."""
