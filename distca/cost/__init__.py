"""Costs of a plan: exact bytes, and seconds by a measured or an analytic model."""
