"""Decode steps by graphs, whole or of pieces of layers: which are captured, what they answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.serving.planned_steps import PlannedSteps
from distca.attention import select_kernel
from distca.attention.kernel import Outputs
from distca.attention.paged import KeyTable, TableKernel
from distca.attention.torch_cpu import TorchCpuKernel
from distca.inference.cuda_graphs import SIZES, Capture, DecodeGraphs, capture_for, size_for
from distca.inference.models import ServedModel, read_model
from support.fake_graphs import FakeCapture
from support.ranks import Ranks
from support.small_models import VOCABULARY, save_small_model


class _ByTable(TorchCpuKernel):
    """A `TableKernel` on CPUs: attention as it is defined, for which the host asks no tensor."""

    def reads_table(self, head_dim: int) -> bool:
        return True

    def forward_table(
        self,
        q_THD: torch.Tensor,
        k_SHD: torch.Tensor,
        v_SHD: torch.Tensor,
        table: KeyTable,
        softmax_scale: float,
        window_left: int | None = None,
        softcap: float | None = None,
    ) -> Outputs:
        k, v = (table.pages(x)[table.blocks.long()].flatten(1, 2) for x in (k_SHD, v_SHD))
        q = q_THD.unflatten(1, (k.shape[2], -1))
        scores = torch.einsum("thgd,tkhd->thgk", q, k) * softmax_scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        behind = table.used[:, None] - 1 - torch.arange(k.shape[1])
        seen = (behind >= 0) & (behind <= (k.shape[1] if window_left is None else window_left))
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        # Blocks behind those that are used may have anything.
        v = torch.where(seen[..., None, None], v, 0)
        out = torch.einsum("thgk,tkhd->thgd", scores.softmax(-1), v)
        return out.flatten(1, 2), scores.logsumexp(-1).flatten(1)


def logits_of_a_rank(
    model: ServedModel, capture: Capture | None, device: str = "cpu", by_table: bool = False
) -> list[dict[int, torch.Tensor]]:
    """Logits of seven decode steps, of which the last two have fewer sequences."""
    import torch.distributed as dist

    from distca.cost.steps import STEP_SLOTS
    from distca.inference.model_runner import ModelRunner
    from distca.runtime import Buffers, CoreAttention
    from distca.transport import CollectiveTransport, new_exchange_group

    on, size = torch.device(device), dist.get_world_size()
    group = new_exchange_group(list(range(size)))
    assert group is not None
    core = CoreAttention(
        CollectiveTransport(group, on, members_only=True),
        _ByTable()
        if by_table
        else select_kernel(on.type, model.shape.head_dim, model.softcap is not None),
        Buffers(on, max(STEP_SLOTS, len(model.masks))),
    )
    block_size = 256 if on.type == "cuda" else 4
    rank = ModelRunner(model, core, on, 60, block_size, capture=capture)
    planner = PlannedSteps(model.masks, size, block_size, runner=rank)
    rng, found = np.random.default_rng(1), []
    lengths = dict(zip(range(6), (30, 1, 62, 7, 3, 12), strict=True))
    prompts = {n: rng.integers(0, VOCABULARY, count).tolist() for n, count in lengths.items()}
    rank.run(planner.plan(lengths), prompts)
    for step in range(7):
        fed = {n: [int(rng.integers(VOCABULARY))] for n in range(6 if step < 5 else 3)}
        logits = rank.run(planner.plan(dict.fromkeys(fed, 1)), fed)
        found.append({n: row.cpu() for n, row in logits.items()})
    return found


def with_and_without(model: ServedModel) -> tuple[float, int, int, list[int]]:
    """How far logits are apart, the graphs, their replays, and the rows of each step."""
    capture = FakeCapture()
    pairs = zip(logits_of_a_rank(model, None), logits_of_a_rank(model, capture), strict=True)
    apart, rows = 0.0, []
    for plain, replayed in pairs:
        assert plain.keys() == replayed.keys()
        rows.append(len(plain))
        apart = max([apart, *(float((plain[n] - replayed[n]).abs().max()) for n in plain)])
    return apart, capture.graphs, capture.replays, rows


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_graphs_answer_what_layers_answer(ranks: Ranks, tmp_path: Path, family: str) -> None:
    """On two ranks, whose numbers of rows change; a padded number of rows is captured once."""
    model = read_model(str(save_small_model(family, tmp_path)), torch.float32)
    for apart, graphs, replays, rows in ranks.run(with_and_without, model, world_size=2):
        assert apart < 1e-5
        pieces, decoding = len(model.windows) + 1, [size_for(n) for n in rows if n]
        assert len({*rows}) > 1
        assert graphs == pieces * len({*decoding})
        assert replays == pieces * len(decoding)


def test_rows_are_padded_to_the_next_size() -> None:
    assert [size_for(rows) for rows in (1, 2, 3, 5, 9, 250)] == [1, 2, 4, 8, 16, 256]
    capture, none = FakeCapture(), torch.zeros(SIZES[-1] + 1, dtype=torch.int64)
    graphs = DecodeGraphs(None, (None,), torch.device("cpu"), capture)
    assert graphs.run(none, none, None) is None  # type: ignore[arg-type]
    assert capture.graphs == 0


def test_who_has_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs have, unless a flag says otherwise; not for layers that ask the host what to do."""
    made: list[torch.device] = []
    monkeypatch.setattr("distca.inference.cuda_graphs.CudaCapture", made.append)
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    llama = read_model(str(save_small_model("llama", tmp_path)), torch.float32)
    experts = read_model(str(save_small_model("qwen3_moe", tmp_path)), torch.float32)
    dynamic: dict[str, Any] = {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    }
    growing = read_model(str(save_small_model("qwen3", tmp_path, **dynamic)), torch.float32)
    capture_for(llama, gpu, False)
    assert made == [gpu]
    for model, device, enforce_eager in (
        (llama, cpu, False),
        (llama, gpu, True),
        (replace(llama, tensor_parallel_size=2), gpu, False),
    ):
        assert capture_for(model, device, enforce_eager) is None
    assert made == [gpu]
    # On CPUs experts are transformers' own.
    asking = [each.runnable(cpu).asks_host for each in (llama, experts, growing)]
    assert asking == [False, True, True]


def whole_and_without(model: ServedModel) -> tuple[float, int, int]:
    """How far logits are apart, the graphs, and their replays."""
    assert isinstance(_ByTable(), TableKernel)
    capture, apart = FakeCapture(), 0.0
    runs = (logits_of_a_rank(model, each, by_table=True) for each in (None, capture))
    for plain, replayed in zip(*runs, strict=True):
        assert plain.keys() == replayed.keys()
        apart = max([apart, *(float((plain[n] - replayed[n]).abs().max()) for n in plain)])
    return apart, capture.graphs, capture.replays


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text"])
def test_a_step_of_a_rank_alone_is_one_graph(ranks: Ranks, tmp_path: Path, family: str) -> None:
    """A graph for six rows and one for three; again for six once the table has more columns."""
    model = read_model(str(save_small_model(family, tmp_path)), torch.float32)
    [(apart, graphs, replays)] = ranks.run(whole_and_without, model, world_size=1)
    assert apart < 1e-5
    assert (graphs, replays) == (3, 7)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path: Path) -> None:
    import torch.distributed as dist

    model = read_model(str(save_small_model("llama", tmp_path, head_dim=64)), torch.bfloat16)
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    capture = capture_for(model, torch.device("cuda", 0), False)
    assert capture is not None
    plain, replayed = (logits_of_a_rank(model, each, "cuda") for each in (None, capture))
    dist.destroy_process_group()
    for one, other in zip(plain, replayed, strict=True):
        assert all(torch.allclose(one[n], other[n], rtol=0, atol=2e-2) for n in one)
