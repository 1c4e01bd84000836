"""Writes a checkpoint as a model for transformers; all it needs is the checkpoint.

Maps weights in both directions: `llama.py` imports with the tables here.

The model's sizes, `norm_epsilon`, `rotary_base`, rotary scaling and positions are among the flags
that every checkpoint keeps. Models are exported that are Llamas by their flags; what a Llama has
not is refused by name. The folder also gets the tokenizer that is kept beside checkpoints, a
generation config and a chat template, so that servers of transformers' models take it as it is.
"""

from __future__ import annotations

import json
import logging
import shutil
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distca.documents.tokenizer import Tokenizer, build_tokenizer
from megatron_patches.loop.kept_tokenizer import kept_tokenizer, tokenizer_files

logger = logging.getLogger(__name__)

LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Llama 3's scaling of rotary angles as megatron-core has it; only the factor can be chosen."""

_OF_A_LLAMA = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "apply_layernorm_1p": False,
    "multi_latent_attention": False,
    "num_experts": None,
    "window_size": None,
    "softmax_type": "vanilla",
}
"""Flags of a Llama; those that a run does not know are as they are here."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""Conversations as text of a model that was pretrained alone: a line for each message."""


def build_model(flags: list[str], bf16: bool) -> tuple[Any, Namespace]:
    """Makes the whole model that flags describe, with random weights, and its arguments.

    Must run in a fresh process, in which it starts a process group of one.

    Args:
        flags: flags of `pretrain_gpt.py` for the model and its tokenizer.
        bf16: make weights in bfloat16, else in float32.
    """
    from megatron_patches import parts

    flags = flags + ["--bf16"] * bf16
    # Flags that a run requires, and that the weights don't depend on.
    flags += "--seq-length 128 --micro-batch-size 1 --train-iters 1 --lr 1 --data-path -".split()
    flags += ["--no-save-optim", "--no-save-rng", "--no-load-optim", "--no-load-rng"]
    flags += ["--attention-dropout", "0", "--hidden-dropout", "0", "--split", "100,0,0"]
    args = parts.parse_args(flags)
    if not dist.is_initialized():
        dist.init_process_group(
            args.distributed_backend,
            rank=0,
            world_size=1,
            store=dist.HashStore(),  # type: ignore[attr-defined]
        )
    parts.initialize(args)
    return parts.build_model(args), args


def saved_flags(saved: Namespace, tokenizer_model: str | None) -> list[str]:
    """Returns the flags of the model that a checkpoint keeps.

    Args:
        saved: arguments of the run that made it.
        tokenizer_model: a tokenizer.json or its folder; None: the tokenizer has no files.
    """
    flags = {
        "--num-layers": saved.num_layers,
        "--hidden-size": saved.hidden_size,
        "--ffn-hidden-size": saved.ffn_hidden_size,
        "--num-attention-heads": saved.num_attention_heads,
        "--kv-channels": saved.kv_channels,
        "--num-query-groups": _groups(saved),
        "--norm-epsilon": saved.norm_epsilon,
        "--rotary-base": saved.rotary_base,
        "--max-position-embeddings": longest_positions(saved),
        "--tokenizer-type": saved.tokenizer_type,
    }
    words = [word for flag, value in flags.items() for word in (flag, str(value))]
    words += (
        "--group-query-attention --normalization RMSNorm --swiglu --disable-bias-linear".split()
    )
    words += ["--position-embedding-type", "rope"]
    if saved.untie_embeddings_and_output_weights:
        words.append("--untie-embeddings-and-output-weights")
    if saved.use_rope_scaling:
        words += ["--use-rope-scaling", "--rope-scaling-factor", str(saved.rope_scaling_factor)]
    if tokenizer_model is not None:
        words += ["--tokenizer-model", tokenizer_model]
    if saved.tokenizer_type == "NullTokenizer":
        words += ["--vocab-size", str(saved.vocab_size)]
    return words


def _groups(saved: Namespace) -> int:
    shared = getattr(saved, "group_query_attention", False)
    return int(saved.num_query_groups if shared else saved.num_attention_heads)


def longest_positions(saved: Namespace) -> int:
    """Returns the longest positions that a model was trained on: documents may span windows."""
    longest = vars(saved).get("distca_max_document_length") or 0
    return max(int(saved.max_position_embeddings), int(longest))


def llama_config(saved: Namespace, end_of_document: int) -> dict[str, Any]:
    """Returns the `config.json` of a Llama, in the form that transformers 4 and 5 read.

    Args:
        saved: arguments of the run, with the vocabulary's size.
        end_of_document: token that ends a document.

    Raises:
        ValueError: the model is no Llama.
    """
    for name, wanted in _OF_A_LLAMA.items():
        value = getattr(saved, name, wanted)
        if value != wanted:
            raise ValueError(
                f"the model was trained with {name} {value!r}, but a Llama has {wanted!r}: only "
                "Llamas are exported"
            )
    scaling = None
    if saved.use_rope_scaling:
        scaling = {"rope_type": "llama3", "factor": saved.rope_scaling_factor, **LLAMA3_ROPE}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": saved.vocab_size,
        "num_hidden_layers": saved.num_layers,
        "hidden_size": saved.hidden_size,
        "intermediate_size": saved.ffn_hidden_size,
        "num_attention_heads": saved.num_attention_heads,
        "num_key_value_heads": _groups(saved),
        "head_dim": saved.kv_channels,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": saved.norm_epsilon,
        "rope_theta": float(saved.rotary_base),
        "rope_scaling": scaling,
        "max_position_embeddings": longest_positions(saved),
        "tie_word_embeddings": not saved.untie_embeddings_and_output_weights,
        "bos_token_id": None,
        "eos_token_id": end_of_document,
    }


def llama_weights(
    weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Returns a Llama's weights by transformers' names.

    Args:
        weights: weights of the whole model, by the names of Megatron's local layers or those of
            Transformer Engine's.
        config: the model's `config.json`.
    """
    vocabulary, heads = config["vocab_size"], config["num_attention_heads"]
    groups, size = config["num_key_value_heads"], config["head_dim"]
    found: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        prefix = name.replace("decoder.layers", "model.layers")
        if name in _OUTSIDE_LAYERS:
            found[_OUTSIDE_LAYERS[name]] = weight[:vocabulary] if "norm" not in name else weight
        elif name.endswith(".linear_qkv.weight"):
            # Queries of a group, its key and its value follow each other.
            parts = weight.view(groups, heads // groups + 2, size, -1)
            rows = {"q": parts[:, :-2], "k": parts[:, -2], "v": parts[:, -1]}
            for letter, part in rows.items():
                own = prefix.replace("self_attention.linear_qkv", f"self_attn.{letter}_proj")
                found[own] = part.reshape(-1, weight.shape[1])
        elif name.endswith(".linear_fc1.weight"):
            for kind, part in zip(("gate", "up"), weight.chunk(2), strict=True):
                found[prefix.replace("linear_fc1", f"{kind}_proj")] = part
        else:
            for ours, theirs in _IN_LAYERS.items():
                if name.endswith(ours):
                    found[prefix.removesuffix(ours) + theirs] = weight
                    break
            else:
                raise ValueError(f"a Llama has no weight {name}: only Llamas are exported")
    return {name: weight.detach().clone() for name, weight in found.items()}


_OUTSIDE_LAYERS = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
_IN_LAYERS = {
    ".input_layernorm.weight": ".input_layernorm.weight",
    ".self_attention.linear_qkv.layer_norm_weight": ".input_layernorm.weight",
    ".self_attention.linear_proj.weight": ".self_attn.o_proj.weight",
    ".pre_mlp_layernorm.weight": ".post_attention_layernorm.weight",
    ".mlp.linear_fc1.layer_norm_weight": ".post_attention_layernorm.weight",
    ".mlp.linear_fc2.weight": ".mlp.down_proj.weight",
}


def copy_llama_weights(
    llama: Mapping[str, torch.Tensor], model: Any, config: Mapping[str, Any]
) -> None:
    """Copies a Llama's weights into a Megatron model: the inverse of `llama_weights`.

    Args:
        llama: weights by transformers' names; without `lm_head.weight` embeddings are tied.
        model: whole model, on one process. Its vocabulary may be padded: padding becomes zero.
        config: the model's `config.json`.
    """
    groups, size = config["num_key_value_heads"], config["head_dim"]
    used: set[str] = set()

    def take(name: str) -> torch.Tensor:
        used.add(name)
        return llama[name]

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            prefix = name.replace("decoder.layers", "model.layers")
            if name in _OUTSIDE_LAYERS:
                weight = take(_OUTSIDE_LAYERS[name])
                parameter[len(weight) :].zero_()
                parameter[: len(weight)].copy_(weight)
                continue
            if name.endswith(".linear_qkv.weight"):
                own = prefix.replace("self_attention.linear_qkv", "self_attn.{}_proj")
                parts = [
                    take(own.format(letter)).view(groups, -1, size, parameter.shape[1])
                    for letter in "qkv"
                ]
                weight = torch.cat(parts, 1).flatten(0, 2)
            elif name.endswith(".linear_fc1.weight"):
                own = prefix.replace("linear_fc1", "{}_proj")
                weight = torch.cat([take(own.format(kind)) for kind in ("gate", "up")])
            else:
                ours = next(each for each in _IN_LAYERS if name.endswith(each))
                weight = take(prefix.removesuffix(ours) + _IN_LAYERS[ours])
            assert weight.shape == parameter.shape, name
            parameter.copy_(weight)
    assert used == {*llama}, {*llama} - used


def export(
    checkpoint: Path,
    output: Path,
    tokenizer_model: str | None = None,
    float32: bool = False,
    force: bool = False,
    told: Callable[[str], None] = lambda doing: None,
) -> None:
    """Writes the latest checkpoint of a folder as a model for transformers.

    Must run in a fresh process, in which it starts a process group of one.

    Args:
        checkpoint: folder that the run gave to `--save`.
        output: folder for safetensors, `config.json`, generation config, tokenizer and template.
        tokenizer_model: a tokenizer.json or its folder; None: the one beside the checkpoints, or
            else where the run had it.
        float32: write float32, else what the run had.
        force: replace files of the same names in a folder that has files already.
        told: function that is called with what is being done.

    Raises:
        ValueError: the checkpoint is missing or not of a Llama, the tokenizer is missing, or the
            output has files already.
        ImportError: safetensors is not installed.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("exporting needs `pip install safetensors`") from error
    from megatron_patches.checkpoint_data import read_common_state
    from megatron_patches.loop.checkpoint_folder import (
        checkpoint_name,
        explaining_loading,
        latest_iteration,
    )
    from megatron_patches.loop.saved_arguments import saved_arguments
    from megatron_patches.parts import load_weights

    if output.exists() and not output.is_dir():
        raise ValueError(f"--output {output} is a file: give a folder")
    if not force and output.is_dir() and any(output.iterdir()):
        raise ValueError(
            f"--output {output} has files already: give another folder, or --force to replace them"
        )
    iteration = latest_iteration(checkpoint)
    if iteration is None:
        raise ValueError(f"{checkpoint} has no checkpoint: give the folder of a run's --save")
    with explaining_loading(checkpoint, iteration):
        common = read_common_state(checkpoint_name(checkpoint, iteration))
    saved = saved_arguments(common)
    if saved.tokenizer_type == "SFTTokenizer":
        # It has the same files.
        saved.tokenizer_type = "HuggingFaceTokenizer"
    where = tokenizer_model or kept_tokenizer(checkpoint) or saved.tokenizer_model
    where = None if where is None else str(where)
    flags = saved_flags(saved, where)
    size = saved.vocab_size - 1 if saved.tokenizer_type == "NullTokenizer" else None
    tokenizer = build_tokenizer(saved.tokenizer_type, where, size)
    saved.vocab_size = tokenizer.vocab_size
    config = llama_config(saved, tokenizer.eod)
    bf16 = bool(saved.bf16) and not float32
    told("loading the weights")
    model, args = build_model(flags, bf16)
    load_weights(model, args, checkpoint)
    config["dtype"] = config["torch_dtype"] = "bfloat16" if bf16 else "float32"
    weights = llama_weights(dict(model.named_parameters()), config)
    told("writing the model")
    output.mkdir(parents=True, exist_ok=True)
    _write(output / "config.json", config)
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    # safetensors makes its file readable for the owner only, whatever the umask is.
    shutil.copymode(output / "config.json", output / "model.safetensors")
    _write(output / "generation_config.json", {"eos_token_id": tokenizer.eod, "do_sample": False})
    _write_tokenizer(saved.tokenizer_type, where, tokenizer, config, output)
    logger.info("exported iteration %d of %s to %s", iteration, checkpoint, output)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(
    kind: str, model: str | None, tokenizer: Tokenizer, config: Mapping[str, Any], output: Path
) -> None:
    """Copies a tokenizer's files, and adds what says how it ends documents and writes messages."""
    if kind != "HuggingFaceTokenizer" or model is None:
        logger.warning("%s has no files: the model is exported without a tokenizer", kind)
        return
    for name, file in tokenizer_files(model).items():
        shutil.copy(file, output / name)
    given = output / "tokenizer_config.json"
    settings = json.loads(given.read_text(encoding="utf-8")) if given.is_file() else {}
    settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    settings.setdefault("model_max_length", config["max_position_embeddings"])
    settings.setdefault("eos_token", tokenizer.detokenize([tokenizer.eod]))
    if not (output / "chat_template.jinja").is_file():
        settings.setdefault("chat_template", CHAT_TEMPLATE)
    _write(output / "tokenizer_config.json", settings)
