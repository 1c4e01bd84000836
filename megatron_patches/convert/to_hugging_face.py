"""From a run's checkpoint to a model of Hugging Face; all it needs is the checkpoint.

The flags that every checkpoint keeps say what the model is. Which family it is of, and what
`config.json` says besides, is in the configuration that is kept beside checkpoints of a converted
model. A model that never was another's is a Llama if its flags are a Llama's. The folder also gets
the tokenizer that is kept beside checkpoints, a generation config and a chat template, so that
servers of transformers' models take it as it is.
"""

from __future__ import annotations

import json
import logging
import shutil
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distca.checkpoints.weights import Checkpoint
from distca.documents.tokenizer import Tokenizer, build_tokenizer
from megatron_patches.checkpoint_data import read_common_state
from megatron_patches.convert.folder import check_free, write_json, write_weights, written_whole
from megatron_patches.convert.model import build_model, flags_of, parse_model
from megatron_patches.convert.sample import sample_tokens
from megatron_patches.convert.weights import by_their_names, pad_vocabulary
from megatron_patches.families.bridges import bridge_of
from megatron_patches.families.flags import vocabulary_flags
from megatron_patches.families.rotary import LLAMA3_ROPE
from megatron_patches.loop.checkpoint_folder import (
    checkpoint_name,
    explaining_loading,
    latest_iteration,
)
from megatron_patches.loop.kept_tokenizer import kept_tokenizer, tokenizer_files
from megatron_patches.loop.saved_arguments import model_differences, saved_arguments
from megatron_patches.parts import load_weights

logger = logging.getLogger(__name__)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""Conversations as text of a model that was pretrained alone: a line for each message."""


def to_hugging_face(
    checkpoint: Path,
    output: Path,
    model_folder: Path | None = None,
    tokenizer_model: str | None = None,
    float32: bool = False,
    force: bool = False,
    told: Callable[[str], None] = lambda doing: None,
    sample: str | None = None,
) -> tuple[Any, Namespace]:
    """Writes the latest checkpoint of a folder as a model for transformers.

    Must run in a fresh process, in which it starts a process group of one.

    Args:
        checkpoint: folder that the run gave to `--save`.
        output: folder for safetensors, `config.json`, generation config, tokenizer and template.
        model_folder: folder of the model that training began from, or another of its architecture;
            None: the configuration beside the checkpoints, if there is one.
        tokenizer_model: a tokenizer.json or its folder; None: the one beside the checkpoints, or
            else where the run had it.
        float32: write float32, else what the run had.
        force: replace files of the same names in a folder that has files already.
        told: function that is called with what is being done.
        sample: sample that the model must have the tokens of; None: no sample.

    Returns:
        Megatron's model, and its arguments.

    Raises:
        ValueError: the checkpoint is missing or of no family that is converted, or not of the model
            in `model_folder`; the tokenizer is missing; the output has files already; or the model
            lacks a token of the sample.
    """
    check_free(output, force)
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
    size = saved.vocab_size - 1 if saved.tokenizer_type == "NullTokenizer" else None
    tokenizer = build_tokenizer(saved.tokenizer_type, where, size)
    bf16 = bool(saved.bf16) and not float32
    values, config, args = _architecture(
        saved,
        _configuration(checkpoint, model_folder),
        tokenizer,
        where,
        bf16,
        only_kept=model_folder is not None,
    )
    if sample is not None:
        has_files = saved.tokenizer_type == "HuggingFaceTokenizer"
        sample_tokens(sample, where if has_files else None, config.vocab_size)
    values["dtype"] = values["torch_dtype"] = "bfloat16" if bf16 else "float32"
    generation = _generation(model_folder or kept_tokenizer(checkpoint), tokenizer)
    told("loading the weights")
    model = build_model(args)
    load_weights(model, args, checkpoint)
    bridge = bridge_of(config, args.params_dtype)
    pad_vocabulary(bridge, args)
    told("writing the model")
    with written_whole(output, force) as folder:
        write_json(folder / "config.json", values)
        write_weights(folder, by_their_names(model, bridge))
        (folder / "generation_config.json").write_text(generation, encoding="utf-8")
        _write_tokenizer(saved.tokenizer_type, where, tokenizer, values, folder)
    logger.info("converted iteration %d of %s to %s", iteration, checkpoint, output)
    return model, args


def longest_positions(saved: Namespace) -> int:
    """Returns the longest positions that a model was trained on: documents may span windows."""
    longest = vars(saved).get("distca_max_document_length") or 0
    return max(int(saved.max_position_embeddings), int(longest))


def llama_config(saved: Namespace, vocabulary: int, end_of_document: int) -> dict[str, Any]:
    """Returns the `config.json` of a Llama, in the form that transformers 4 and 5 read.

    Args:
        saved: arguments of the run.
        vocabulary: number of tokens.
        end_of_document: token that ends a document.
    """
    scaling = None
    if saved.use_rope_scaling:
        scaling = {"rope_type": "llama3", "factor": saved.rope_scaling_factor, **LLAMA3_ROPE}
    shared = getattr(saved, "group_query_attention", False)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "num_hidden_layers": saved.num_layers,
        "hidden_size": saved.hidden_size,
        "intermediate_size": saved.ffn_hidden_size,
        "num_attention_heads": saved.num_attention_heads,
        "num_key_value_heads": saved.num_query_groups if shared else saved.num_attention_heads,
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


def _configuration(checkpoint: Path, model_folder: Path | None) -> dict[str, Any] | None:
    """Returns the `config.json` that a checkpoint's model had before, as a language model's."""
    folder = model_folder or kept_tokenizer(checkpoint)
    if folder is None or (model_folder is None and not (folder / "config.json").is_file()):
        return None
    return Checkpoint.read(str(folder)).language_values()


def _architecture(
    saved: Namespace,
    kept: dict[str, Any] | None,
    tokenizer: Tokenizer,
    tokenizer_model: str | None,
    bf16: bool,
    only_kept: bool = False,
) -> tuple[dict[str, Any], Any, Namespace]:
    """Returns the `config.json` of a checkpoint's model, as a configuration, and its arguments.

    Raises:
        ValueError: `kept` is not that of the model, and a Llama's is not, or must not be tried.
    """
    tried = [] if kept is None else [_of_this_run(kept, saved, tokenizer)]
    if not only_kept:
        tried.append(llama_config(saved, tokenizer.vocab_size, tokenizer.eod))
    differ = ""
    for values in tried:
        config = _as_configuration(values)
        flags = flags_of(config) + _tokenizer_flags(saved, tokenizer_model, config, tokenizer)
        args = parse_model(flags, bf16)
        different = model_differences(saved, args)
        if not different:
            return values, config, args
        differ = differ or f"not that of a {config.model_type}: it was trained with {different}"
    raise ValueError(
        f"the model is {differ}: give --hf-model FOLDER with the config.json of its family"
    )


def _of_this_run(kept: Mapping[str, Any], saved: Namespace, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns a configuration with what training may have changed: angles, positions, rows."""
    values = {**kept}
    base = {"rope_theta": float(saved.rotary_base)}
    scaling = {"factor": saved.rope_scaling_factor} if saved.use_rope_scaling else {}
    if "rope_theta" in values or not values.get("rope_parameters"):
        values |= base
    if rope := values.get("rope_parameters"):
        if main := rope.get("full_attention"):
            # Each kind of layer has its own; flags are those of layers without a window.
            values["rope_parameters"] = {**rope, "full_attention": {**main, **base}}
        else:
            values["rope_parameters"] = {**rope, **base, **scaling}
    if scaling and values.get("rope_scaling"):
        values["rope_scaling"] = {**values["rope_scaling"], **scaling}
    longest = max(values.get("max_position_embeddings") or 0, longest_positions(saved))
    values["max_position_embeddings"] = longest
    if values.get("num_nextn_predict_layers"):
        # The way to Megatron leaves them out.
        values["num_nextn_predict_layers"] = 0
    if values.get("vocab_size", 0) > saved.padded_vocab_size:
        # The run dropped rows that no token of its tokenizer has.
        values["vocab_size"] = tokenizer.vocab_size
    return values


def _as_configuration(values: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    named = {**values}
    return AutoConfig.for_model(named.pop("model_type"), **named)


def _tokenizer_flags(
    saved: Namespace, tokenizer_model: str | None, config: Any, tokenizer: Tokenizer
) -> list[str]:
    words = ["--max-position-embeddings", str(config.max_position_embeddings)]
    words += ["--tokenizer-type", saved.tokenizer_type]
    if tokenizer_model is not None:
        words += ["--tokenizer-model", tokenizer_model]
    if saved.tokenizer_type == "NullTokenizer":
        words += ["--vocab-size", str(saved.vocab_size)]
    return words + vocabulary_flags(tokenizer.vocab_size, config.vocab_size)


def _generation(before: Path | None, tokenizer: Tokenizer) -> str:
    """Returns how text is generated: as before training, or the likeliest until a document ends.

    It is the text of a file, in JSON.

    Raises:
        ValueError: what there was before cannot be read.
    """
    given = None if before is None else before / "generation_config.json"
    if given is None or not given.is_file():
        return json.dumps({"eos_token_id": tokenizer.eod, "do_sample": False}, indent=2) + "\n"
    try:
        text = given.read_text(encoding="utf-8")
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{given} cannot be read ({error}): correct or remove it") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{given} is no object of JSON, {{...}}: correct or remove it")
    return text


def _write_tokenizer(
    kind: str, model: str | None, tokenizer: Tokenizer, config: Mapping[str, Any], output: Path
) -> None:
    """Copies a tokenizer's files, and adds what says how it ends documents and writes messages."""
    if kind != "HuggingFaceTokenizer" or model is None:
        logger.warning("%s has no files: the model is written without a tokenizer", kind)
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
    write_json(output / "tokenizer_config.json", settings)
