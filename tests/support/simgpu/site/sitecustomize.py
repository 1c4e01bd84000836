"""Gives every Python process that finds this file the simulated GPUs of its environment."""

import os

if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
    from support.simgpu import cuda

    cuda.install()
