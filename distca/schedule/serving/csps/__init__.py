"""Communication-efficient sequence parallelism (CSPS). Pure functions of values."""
