"""Checkpoints that are broken at random, each known to be harmless or not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_PARTS = ("vision_tower", "multi_modal_projector")


@dataclass
class Draft:
    """A checkpoint before it is written.

    Attributes:
        tensors: its tensors by name.
        config: its `config.json`.
        rng: source of all choices.
    """

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    rng: np.random.Generator

    @classmethod
    def of(cls, model: Path, seed: int) -> Draft:
        """Reads a model's folder."""
        config = json.loads((model / "config.json").read_text())
        return cls(load_file(model / WEIGHTS), config, np.random.default_rng(seed))

    @property
    def sizes(self) -> dict[str, Any]:
        """Configuration of the language model."""
        sizes: dict[str, Any] = self.config.get("text_config", self.config)
        return sizes

    def any_name(self) -> str:
        """The name of one of the tensors."""
        return str(self.rng.choice(sorted(self.tensors)))

    def matters(self, name: str) -> bool:
        """Whether the language model has a tensor."""
        return not name.startswith(OTHER_PARTS)

    def write(self, folder: Path) -> None:
        save_file(self.tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config))


def leave_out(draft: Draft) -> bool:
    name = draft.any_name()
    del draft.tensors[name]
    return draft.matters(name)


def rename(draft: Draft) -> bool:
    name = draft.any_name()
    letter = int(draft.rng.integers(name.rindex(".") + 1, len(name)))
    draft.tensors[f"{name[:letter]}x{name[letter:]}"] = draft.tensors.pop(name)
    return draft.matters(name)


def rename_all(draft: Draft) -> bool:
    draft.tensors = {f"transformer.{name}": each for name, each in draft.tensors.items()}
    return True


def without_prefix(draft: Draft) -> bool:
    """As the base model is saved; transformers adds the prefix of language models."""
    draft.tensors = {name.removeprefix("model."): each for name, each in draft.tensors.items()}
    return False


def cut(draft: Draft) -> bool:
    name = draft.any_name()
    tensor = draft.tensors[name]
    dim = int(draft.rng.integers(tensor.dim()))
    kept = int(draft.rng.integers(tensor.shape[dim]))
    draft.tensors[name] = tensor.narrow(dim, 0, kept).contiguous()
    return draft.matters(name)


def lengthen(draft: Draft) -> bool:
    name = draft.any_name()
    draft.tensors[name] = torch.cat([draft.tensors[name], draft.tensors[name][:1]])
    return draft.matters(name)


def transpose(draft: Draft) -> bool:
    shapes = {name: each.shape for name, each in draft.tensors.items()}
    oblong = [name for name in sorted(shapes) if len({*shapes[name][:2]}) == 2]
    name = str(draft.rng.choice(oblong))
    draft.tensors[name] = draft.tensors[name].transpose(0, 1).contiguous()
    return draft.matters(name)


def integers(draft: Draft) -> bool:
    name, kind = draft.any_name(), int(draft.rng.integers(4))
    kinds = torch.int8, torch.int64, torch.uint8, torch.bool
    draft.tensors[name] = draft.tensors[name].to(kinds[kind])
    return draft.matters(name)


def other_floats(draft: Draft) -> bool:
    name, kind = draft.any_name(), int(draft.rng.integers(3))
    draft.tensors[name] = draft.tensors[name].to(
        (torch.bfloat16, torch.float16, torch.float64)[kind]
    )
    return False


def add(draft: Draft) -> bool:
    name = draft.any_name()
    head, last = name.rsplit(".", 1)
    draft.tensors[f"{head}.adapter.{last}"] = torch.ones(3)
    return draft.matters(name)


def add_frequencies(draft: Draft) -> bool:
    """As checkpoints had of each layer, which models compute."""
    of_layer = next(
        name for name in sorted(draft.tensors) if name.endswith("self_attn.o_proj.weight")
    )
    name = of_layer.replace("o_proj.weight", "rotary_emb.inv_freq")
    draft.tensors[name] = torch.arange(8.0)
    return False


def give_twice(draft: Draft) -> bool:
    """A name with the prefix and one without are one parameter for transformers."""
    name = next(
        each for each in sorted(draft.tensors) if each.endswith(".0.input_layernorm.weight")
    )
    other = name.removeprefix("language_model.").removeprefix("model.")
    draft.tensors[other] = draft.tensors[name] + 1
    return True


def other_size(draft: Draft) -> bool:
    """A configuration whose sizes are not those of the tensors."""
    names = (
        "num_hidden_layers num_key_value_heads head_dim hidden_size intermediate_size vocab_size"
    )
    name = str(draft.rng.choice(names.split()))
    by = int(draft.rng.choice([-2, 2, 4]))
    if name == "num_hidden_layers":
        by = int(draft.rng.choice([-1, 1]))
        kinds = draft.sizes.get("layer_types")
        if kinds:
            draft.sizes["layer_types"] = (kinds * 2)[: len(kinds) + by]
    if name == "num_key_value_heads":
        by = int(draft.rng.choice([-1, 2]))
    draft.sizes[name] += by
    # With experts no layer has a feed-forward part of this width.
    return not (name == "intermediate_size" and "moe_intermediate_size" in draft.sizes)


def other_tying(draft: Draft) -> bool:
    """Tensors without a head need tying; with a head of its own transformers ties nothing."""
    tied = not draft.config.get("tie_word_embeddings", False)
    draft.config["tie_word_embeddings"] = draft.sizes["tie_word_embeddings"] = tied
    return not tied


def nonsense(draft: Draft) -> bool:
    names = "num_hidden_layers num_attention_heads hidden_size vocab_size intermediate_size"
    name = str(draft.rng.choice(names.split()))
    values = (0, -3, "many", None, 2.5, [4])
    draft.sizes[name] = values[int(draft.rng.integers(len(values)))]
    return not (name == "intermediate_size" and "moe_intermediate_size" in draft.sizes)


def of_shards(draft: Draft, folder: Path) -> bool:
    _write_shards(draft, folder)
    return False


def shard_out_of_the_index(draft: Draft, folder: Path) -> bool:
    index = _write_shards(draft, folder)
    names = {name: file for name, file in index.items() if file != "shard-1.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    return any(draft.matters(name) for name in index.keys() - names.keys())


def missing_shard(draft: Draft, folder: Path) -> bool:
    _write_shards(draft, folder)
    (folder / "shard-2.safetensors").unlink()
    return True


def shards_that_overlap(draft: Draft, folder: Path) -> bool:
    _write_shards(draft, folder)
    first = load_file(folder / "shard-0.safetensors")
    other = load_file(folder / "shard-1.safetensors")
    name = sorted(first)[0]
    save_file({**other, name: first[name] + 1}, folder / "shard-1.safetensors")
    return True


def damaged_index(draft: Draft, folder: Path) -> bool:
    _write_shards(draft, folder)
    texts = ("", "[]", "{", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": 3}')
    (folder / INDEX).write_text(texts[int(draft.rng.integers(len(texts)))])
    return True


def truncate(draft: Draft, folder: Path) -> bool:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: int(draft.rng.integers(len(content)))])
    return True


def damaged_header(draft: Draft, folder: Path) -> bool:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[int(draft.rng.integers(8))] ^= 0x55
    (folder / WEIGHTS).write_bytes(bytes(content))
    return True


def pickled(draft: Draft, folder: Path) -> bool:
    (folder / WEIGHTS).unlink()
    torch.save(draft.tensors, folder / "pytorch_model.bin")
    return False


def truncated_pickle(draft: Draft, folder: Path) -> bool:
    pickled(draft, folder)
    file = folder / "pytorch_model.bin"
    content = file.read_bytes()
    file.write_bytes(content[: int(draft.rng.integers(len(content)))])
    return True


def no_weights(draft: Draft, folder: Path) -> bool:
    (folder / WEIGHTS).unlink()
    return True


def _write_shards(draft: Draft, folder: Path) -> dict[str, str]:
    (folder / WEIGHTS).unlink()
    names = sorted(draft.tensors)
    index = {}
    for number in range(3):
        mine, file = names[number::3], f"shard-{number}.safetensors"
        save_file({name: draft.tensors[name] for name in mine}, folder / file)
        index |= dict.fromkeys(mine, file)
    # transformers wants the metadata, too.
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return index


IN_DRAFTS: tuple[Callable[[Draft], bool], ...] = (
    leave_out,
    rename,
    rename_all,
    without_prefix,
    cut,
    lengthen,
    transpose,
    integers,
    other_floats,
    add,
    add_frequencies,
    give_twice,
    other_size,
    other_tying,
    nonsense,
)
"""Each breaks a draft, and returns whether what remains must be refused."""

IN_FOLDERS: tuple[Callable[[Draft, Path], bool], ...] = (
    of_shards,
    shard_out_of_the_index,
    missing_shard,
    shards_that_overlap,
    damaged_index,
    truncate,
    damaged_header,
    pickled,
    truncated_pickle,
    no_weights,
)
"""Each breaks what was written."""


def break_checkpoint(model: Path, folder: Path, seed: int) -> tuple[str, bool]:
    """Writes a broken copy of a model, the same one for the same seed.

    Args:
        model: folder of the model.
        folder: where the copy is made.
        seed: which one; neighbouring ones are broken in different ways.

    Returns:
        How it is broken, and whether it must be refused: else transformers reads it right.
    """
    shutil.copytree(model, folder)
    draft, ways = Draft.of(model, seed), (*IN_DRAFTS, *IN_FOLDERS)
    way: Any = ways[seed % len(ways)]
    if way in IN_DRAFTS:
        refused = way(draft)
        draft.write(folder)
    else:
        draft.write(folder)
        refused = way(draft, folder)
    return way.__name__, refused
