"""How many operators three layers launch in a decode step without graphs, ours and transformers'.

The arguments are families of models. For each the launches are written to standard output, as JSON:
those of a plain model of transformers, whose attention is one kernel and whose cache is
transformers' own, and those of our engine with one rank and with two, where the rank counts that
has the token. They are what three more layers add to a step: some families have layers of two
kinds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from support.simgpu import cuda
from support.simgpu.forked import import_transformers, run_ranks
from support.simgpu.races import count

FEW, MANY = 3, 6
"""Layers of the two models that are compared."""
LENGTH = 300
"""Tokens of the prompt: two ranks have keys of it."""
SECONDS = 300


def main(families: list[str]) -> None:
    """Counts for each family."""
    import_transformers()
    sys.stdout.write(json.dumps({each: _layers_of(each) for each in families}))


def _layers_of(family: str) -> dict[str, int]:
    found = {}
    for name, ranks, run in (
        ("transformers", 1, _plain),
        ("1 rank", 1, _ours),
        ("2 ranks", 2, _ours),
    ):
        counted = run_ranks(
            ranks,
            SECONDS,
            lambda rank, folder, ranks=ranks, run=run: [
                run(family, layers, rank, ranks, folder) for layers in (FEW, MANY)
            ],
        )
        assert not isinstance(counted, str), f"{family}, {name}: {counted}"
        found[name] = max(many - few for few, many in counted)
    return found


def _saved(family: str, layers: int, folder: Path) -> Path:
    from support.small_models import FAMILIES, save_small_model

    kinds = FAMILIES[family][1].get("layer_types")
    changes: dict[str, Any] = {"num_hidden_layers": layers}
    if isinstance(kinds, list):
        changes["layer_types"] = kinds * (layers // len(kinds))
    return save_small_model(family, folder / str(layers), **changes)


def _ours(family: str, layers: int, rank: int, ranks: int, folder: Path) -> int:
    from support.simgpu.answers import answers_of

    model = _saved(family, layers, folder / str(rank))
    stores = folder / f"{layers} layers"
    stores.mkdir(exist_ok=True)
    prompts = [[number % 250 for number in range(LENGTH)]]
    steps = answers_of(str(model), rank, ranks, str(stores), prompts, eager=True)["steps"]
    return int(steps[-1]["launches"])


def _plain(family: str, layers: int, rank: int, ranks: int, folder: Path) -> int:
    import torch
    import transformers

    offsets: dict[int, torch.Tensor] = {}

    def attend(
        module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: object
    ) -> tuple[torch.Tensor, None]:
        q, k, v = (each[0].transpose(0, 1) for each in (q, k, v))
        edges = [offsets[len(each)] for each in (q, k)]
        sizes = len(q), len(k), 0.0, True, False
        found = torch.ops.aten._flash_attention_forward(q, k, v, *edges, *sizes, scale=scaling)
        return found[0][None], None

    transformers.AttentionInterface.register("one_kernel", attend)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        _saved(family, layers, folder), dtype=torch.bfloat16, attn_implementation="one_kernel"
    )
    model = model.cuda().eval()
    device = model.device
    for length in (1, LENGTH, LENGTH + 1, *range(1, 64)):
        offsets[length] = torch.tensor([0, length], dtype=torch.int32, device=device)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        ids = torch.arange(LENGTH, device=device)[None] % 250
        model(input_ids=ids, past_key_values=cache, use_cache=True)
        cuda.native.start()
        model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        return count(cuda.native.stop()).launches


if __name__ == "__main__":
    main(sys.argv[1:])
