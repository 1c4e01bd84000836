"""Helpers that several tests, the recorder or benchmarks share; pytest collects nothing here."""
