"""A server with ranks that prefill and ranks that decode: its engine, its workers, the hand-off."""
