"""The model of `distca prefill`, and whose code computes its layers."""

from __future__ import annotations

import argparse
import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING

from distca.checkpoints.hub import check_path
from distca.commands.command_line import Parser

if TYPE_CHECKING:
    from distca.inference.models import ServedModel


def add_model_flags(parser: Parser) -> None:
    """Adds the flags of `read_prefill_model` that are its alone."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="Folder of a Hugging Face model, or the model's name on the Hugging Face hub.",
    )
    parser.add_argument(
        "--model-impl",
        choices=("auto", "vllm", "transformers"),
        default="auto",
        help="Which library's code runs all layers except attention. auto: vllm if it is "
        "installed and the model's class was tested with it, else transformers. Default: auto.",
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="Maximum number of tokens in a prompt. Use the same value as for `vllm serve`, "
        "because some rotary embeddings depend on it. Default: all positions of the model.",
    )


def read_prefill_model(args: argparse.Namespace) -> tuple[ServedModel, str]:
    """Reads the model; returns it, and a sentence that says whose code computes it.

    Raises:
        ValueError: there is no such model, or it cannot be computed by that code.
        ImportError: a package is missing.
    """
    check_path(args.model)
    if args.model_impl == "transformers":
        return _of_transformers(args), "transformers' code computes the layers"
    if args.model_impl == "vllm":
        return _of_vllm(args)
    if find_spec("vllm") is None:
        told = "vLLM is not installed here"
        return _of_transformers(args), f"transformers' code computes the layers: {told}"
    try:
        return _of_vllm(args)
    except (ValueError, ImportError) as error:
        why = str(error)
    try:
        return _of_transformers(args), f"transformers' code computes the layers: {why}"
    except ValueError as error:
        raise ValueError(f"{why}; and by transformers' code: {error}") from error


def _of_vllm(args: argparse.Namespace) -> tuple[ServedModel, str]:
    """Reads the model by vLLM."""
    from distca.inference.models import DTYPES

    if find_spec("vllm") is None:
        raise ImportError("--model-impl vllm: vLLM is not installed here: use its environment")
    from distca.vllm.model import read_vllm_model

    # Each rank would tell how it loads the model.
    logging.getLogger("vllm").setLevel(logging.WARNING)
    dtype, trusts = DTYPES[args.dtype], args.trust_remote_code
    size, timeout = args.tensor_parallel_size, args.step_timeout
    model = read_vllm_model(args.model, dtype, trusts, args.max_model_len, size, timeout)
    return model, f"vLLM's {model.class_name} computes the layers"


def _of_transformers(args: argparse.Namespace) -> ServedModel:
    """Reads the model by transformers."""
    from distca.inference.models import DTYPES, read_model

    dtype, trusts = DTYPES[args.dtype], args.trust_remote_code
    model = read_model(args.model, dtype, args.tensor_parallel_size, trusts)
    if args.max_model_len is not None and args.max_model_len > model.positions:
        raise ValueError(
            f"--max-model-len {args.max_model_len:,}: the model has {model.positions:,} positions"
        )
    return model
