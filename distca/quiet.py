"""Warnings of libraries that nobody can act upon."""

import logging


def ignore_missing_cuda() -> None:
    """Ignores torch's warning that it finds a compiler of CUDA, but no GPU.

    Megatron-core asks torch for that compiler when it is imported.
    """
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_of_use)


def _is_of_use(record: logging.LogRecord) -> bool:
    return "No CUDA runtime is found" not in record.getMessage()
