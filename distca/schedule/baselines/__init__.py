"""Baseline schedulers, none of which moves a task away from the owner of its queries."""
