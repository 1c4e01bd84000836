"""Execution of inference's plans: paged keys and values, steps, dropped rows, and moves of rows."""
