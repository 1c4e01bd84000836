"""The engine of a server: it schedules, numbers iterations, and has workers run them."""
