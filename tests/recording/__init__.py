"""A recording of what training runs do, to the bit and event by event; see CONTRIBUTING.md."""
