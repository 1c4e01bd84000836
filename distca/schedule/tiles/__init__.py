"""The default scheduler, `tiles` (`scheduler.py`), and its steps: packing, grid, moves, arena."""
