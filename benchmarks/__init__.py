"""Measurements and simulated experiments; `README.md` says what each folder answers.

Commands are run by their path: `python benchmarks/training/throughput.py`. Each first puts the
repository on `sys.path`, so that `benchmarks` and `distca` are found in any working directory,
installed or not. Processes that it starts inherit that.
"""
