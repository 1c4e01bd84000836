"""What a plan costs: bytes, exactly; seconds, by a measured or an analytic model."""
