"""Converts Llama checkpoints of Hugging Face to the model that this repository trains, and back.

    python -m megatron_patches.llama import --llama Llama-3.1-8B --checkpoint llama
    python -m megatron_patches.llama export --checkpoint run --output out

To import, transformers reads the weights, and only if they are exactly those of the model
(`distca/checkpoints/weights.py`); `hugging_face.py` maps their names and shapes. The checkpoint is
Megatron-LM's, of one process; it loads at all parallel sizes, with and without `--distca`. The
command prints the flags that describe the model, for `pretrain_gpt.py`. To export, a checkpoint is
all that is needed: see `hugging_face.py`.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from distca.checkpoints.weights import Checkpoint
from distca.documents.tokenizer import build_tokenizer
from distca.progress import progress
from distca.wording import install
from megatron_patches.hugging_face import LLAMA3_ROPE, build_model, copy_llama_weights, export
from megatron_patches.mcore_fixes import (
    leave_out_messages_of_a_run,
    leave_out_warnings_of_calls,
)

logger = logging.getLogger(__name__)


def model_flags(config: dict[str, Any]) -> list[str]:
    """Returns Megatron's flags for a Llama model.

    Args:
        config: `config.json` of the model with all defaults filled in.

    Raises:
        ValueError: the model has a feature that these flags cannot express.
    """
    if config.get("model_type") != "llama":
        raise ValueError(f"the model is a {config.get('model_type')}: only llama is converted")
    for name, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if config.get(name, wanted) != wanted:
            raise ValueError(
                f"{name} is {config[name]!r}: only models with {wanted!r} are converted"
            )
    flags = {
        "--num-layers": config["num_hidden_layers"],
        "--hidden-size": config["hidden_size"],
        "--ffn-hidden-size": config["intermediate_size"],
        "--num-attention-heads": config["num_attention_heads"],
        "--kv-channels": config.get("head_dim")
        or config["hidden_size"] // config["num_attention_heads"],
        "--num-query-groups": config["num_key_value_heads"],
        "--norm-epsilon": config["rms_norm_eps"],
    }
    switches = "--group-query-attention --normalization RMSNorm --swiglu --disable-bias-linear"
    words = [word for flag, value in flags.items() for word in (flag, str(value))]
    words += [*switches.split(), "--attention-dropout", "0", "--hidden-dropout", "0"]
    if not config.get("tie_word_embeddings"):
        words.append("--untie-embeddings-and-output-weights")
    return words + _rope_flags(config)


def _rope_flags(config: dict[str, Any]) -> list[str]:
    """Returns the flags of the rotary embedding, from either format that transformers writes."""
    rope = {"rope_theta": config.get("rope_theta") or 10000.0}
    rope |= config.get("rope_scaling") or {}
    rope |= config.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    base = float(rope["rope_theta"])
    words = ["--position-embedding-type", "rope", "--rotary-base", str(int(base))]
    if base != int(base):
        raise ValueError(f"rope_theta {base} is no whole number, which --rotary-base must be")
    if kind == "default":
        return words
    if kind == "llama3":
        other = {name: rope[name] for name, known in LLAMA3_ROPE.items() if rope[name] != known}
        if other:
            raise ValueError(f"rotary scaling with {other} is not in megatron-core: {LLAMA3_ROPE}")
        return [*words, "--use-rope-scaling", "--rope-scaling-factor", str(rope["factor"])]
    raise ValueError(f"rotary scaling of type {kind!r} is not converted, only llama3")


def read_checkpoint(llama: Path) -> Checkpoint:
    """Reads the configuration of a checkpoint of Hugging Face, whose own code does not run.

    Raises:
        ValueError: the folder is missing, or has no configuration that can be read.
        ImportError: an extra package is missing.
    """
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ImportError(f"converting needs `{install('llama')}`") from error
    if not llama.is_dir():
        raise ValueError(f"--llama {llama} is no folder: give a checkpoint's")
    return Checkpoint.read(str(llama))


def build_llama(llama: Path, config: Any, bf16: bool) -> tuple[Any, Namespace]:
    """Makes Megatron's model for a Llama checkpoint, with random weights, and its arguments.

    Must run in a fresh process, in which it starts a process group of one.

    Raises:
        ValueError: the model cannot be converted, or the tokenizer is of another model.
    """
    vocabulary = build_tokenizer("HuggingFaceTokenizer", str(llama)).vocab_size
    if vocabulary != config.vocab_size:
        raise ValueError(
            f"{llama} has a tokenizer of {vocabulary} tokens and weights for {config.vocab_size}: "
            "make them equal with transformers' resize_token_embeddings"
        )
    flags = model_flags(config.to_dict())
    flags += ["--max-position-embeddings", str(config.max_position_embeddings)]
    flags += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(llama)]
    return build_model(flags, bf16)


def import_llama(llama: Path, checkpoint: Path, bf16: bool) -> list[str]:
    """Writes a checkpoint of iteration 0 with the weights of a Llama model.

    Args:
        llama: folder of safetensors, `config.json` and `tokenizer.json`.
        checkpoint: directory for `--load`, which has no checkpoint yet.
        bf16: keep weights in bfloat16, else in float32.

    Returns:
        The flags that describe the model, for `pretrain_gpt.py`.

    Raises:
        ValueError: see `build_llama`; or there is a checkpoint already, or the folder does not
            have exactly the weights of its configuration.
        ImportError: an extra package is missing.
    """
    from megatron_patches.loop.checkpoint_folder import latest_iteration
    from megatron_patches.parts import save_weights

    if latest_iteration(checkpoint) is not None:
        raise ValueError(f"--checkpoint {checkpoint} has a checkpoint already: give another one")
    source = read_checkpoint(llama)
    flags = model_flags(source.config.to_dict())
    if left_out := source.check():
        logger.warning("%s: %s left out: only text is trained on", llama, ", ".join(left_out))
    model, args = build_llama(llama, source.config, bf16)
    copy_llama_weights(_weights(source, args.params_dtype), model, source.config.to_dict())
    save_weights(model, args, checkpoint)
    return flags


def _weights(source: Checkpoint, dtype: Any) -> dict[str, Any]:
    """Reads weights by transformers' names, without a head that is tied."""
    loaded = source.load(dtype)
    weights: dict[str, Any] = loaded.state_dict()
    if not source.config.tie_word_embeddings:
        return weights
    if loaded.lm_head.weight is not loaded.model.embed_tokens.weight:
        raise ValueError(
            f"{source.path}: config.json ties embeddings, but lm_head.weight differs from "
            'model.embed_tokens.weight: set "tie_word_embeddings": false'
        )
    del weights["lm_head.weight"]
    return weights


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_patches.llama", description=__doc__.splitlines()[0]
    )
    parser.add_argument("direction", choices=("import", "export"))
    parser.add_argument("--llama", type=Path, help="folder of the Llama model to import")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="directory of Megatron's checkpoints"
    )
    parser.add_argument("--output", type=Path, help="folder of the exported model")
    parser.add_argument(
        "--force", action="store_true", help="export into a folder that has files already"
    )
    parser.add_argument(
        "--tokenizer-model",
        help="tokenizer.json to export, or its folder. Default: the one beside the checkpoints",
    )
    parser.add_argument(
        "--float32",
        action="store_true",
        help="weights in float32; default: bfloat16, and exported as the run had them",
    )
    given = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("megatron_patches").setLevel(logging.INFO)
    leave_out_warnings_of_calls()
    leave_out_messages_of_a_run()
    try:
        if given.direction == "export":
            if given.output is None:
                raise ValueError("export needs --output, the folder to write")
            with progress(f"{parser.prog} export", doing="reading the checkpoint") as shown:
                export(
                    given.checkpoint,
                    given.output,
                    given.tokenizer_model,
                    given.float32,
                    given.force,
                    shown.describe,
                )
            return 0
        if given.llama is None:
            raise ValueError("import needs --llama, the folder of a model")
        with progress(f"{parser.prog} import", doing="converting the model"):
            flags = import_llama(given.llama, given.checkpoint, not given.float32)
        sys.stdout.write(f"{shlex.join(flags)}\n")
    except (ValueError, ImportError) as error:
        parser.exit(2, f"error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
