"""Attention over a pool's blocks, wherever those lie, is attention over the same rows in order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from distca.attention import KernelTasks, paged_cpu, select_kernel, torch_cpu
from distca.attention.paged import PagedKeys
from distca.attention.paged_cpu import load_paged, paged_library
from support.attention_cases import SCALE, assert_close

BLOCK = 4
# Queries of each task, rows before its keys, and the rows' end: none, one block, in one run, many.
TASKS = [(1, 0, 1), (2, 0, 0), (0, 0, 5), (3, 0, 30), (1, 0, 4), (1, 0, 61)]
WINDOWED = [(1, 0, 3), (1, 5, 30), (0, 2, 9), (1, 8, 12), (1, 7, 61), (1, 3, 3)]


def pool_of(lines: int, blocks: int, seed: int) -> np.ndarray:
    """A table with runs of neighbouring blocks of all lengths, and blocks in falling order."""
    rng = np.random.default_rng(seed)
    table = rng.permutation(2 * lines * blocks).astype(np.int32)[: lines * blocks]
    table = table.reshape(lines, blocks)
    table[3, 2:7] = 2 * lines * blocks + np.arange(5)
    table[4] = 2 * lines * blocks + 5 + np.arange(blocks)
    return table


@pytest.mark.parametrize("cases", [TASKS, WINDOWED], ids=["whole", "windowed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [True, False])
def test_cpu_kernel(cases, dtype, compiled, monkeypatch) -> None:
    assert load_paged() is not None
    if not compiled:
        monkeypatch.setattr(torch_cpu, "load_paged", lambda: None)
    torch.manual_seed(0)
    kernel, heads, kv_heads, head_dim = select_kernel("cpu"), 4, 2, 8
    host = pool_of(len(cases), 16, 1)
    queries, first, used = np.array(cases).T
    q = torch.randn(int(queries.sum()), heads, head_dim, dtype=dtype)
    k, v = torch.randn(2, (int(host.max()) + 1) * BLOCK, kv_heads, head_dim, dtype=dtype)
    keys = PagedKeys(torch.from_numpy(host), host, first, used, BLOCK)
    cu = [torch.from_numpy(np.append(0, np.cumsum(n)).astype(np.int32)) for n in (queries, used)]
    tasks = KernelTasks(*cu, False, None, SCALE)
    out, lse = kernel.forward_paged(q, k, v, tasks, keys)
    rows = [
        (line[np.arange(a, b) // BLOCK] * BLOCK + np.arange(a, b) % BLOCK)
        for line, a, b in zip(host.astype(np.int64), first, used, strict=True)
    ]
    assert keys.slots(q.device).tolist() == np.concatenate(rows).tolist()
    dense = KernelTasks(
        cu[0], torch.tensor([0, *np.cumsum(used - first)]).int(), False, None, SCALE
    )
    slots = torch.from_numpy(np.concatenate(rows))
    expected_out, expected_lse = kernel.forward(q, k[slots], v[slots], dense)
    tolerance = 3e-6 if dtype == torch.float32 else 3e-2
    seen = torch.repeat_interleave(torch.from_numpy(used > first), torch.from_numpy(queries))
    assert_close(out[seen], expected_out[seen].double(), tolerance)
    assert_close(lse[seen], expected_lse[seen].double(), tolerance)
    assert not out[~seen].any()
    assert (lse[~seen] == float("-inf")).all()
    # Neighbouring blocks are one run: no kernel call more than there are gaps.
    assert [len(runs) for runs in keys.runs][4] == 1
    assert [len(runs) for runs in keys.runs][3] < -(-int(used[3]) // BLOCK)


def test_runs_are_found_once() -> None:
    host = pool_of(len(TASKS), 16, 1)
    _, first, used = np.array(TASKS).T
    keys = PagedKeys(torch.from_numpy(host), host, first, used, BLOCK)
    assert keys.runs is keys.runs


def test_tasks_without_keys_have_no_slots() -> None:
    nothing = np.zeros(2, dtype=np.int64)
    host = np.zeros((2, 3), dtype=np.int32)
    keys = PagedKeys(torch.from_numpy(host), host, nothing, nothing, BLOCK)
    assert keys.slots(torch.device("cpu")).dtype == torch.int64
    assert keys.slots(torch.device("cpu")).tolist() == []


@dataclass
class Decodes:
    """One query of each of some sequences, of many rows in blocks anywhere."""

    dtype: torch.dtype = torch.float32
    head_dim: int = 32
    lengths: tuple[int, ...] = (700, 3, 128, 129, 257)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        rows, heads, dim = max(self.lengths), (6, 2), self.head_dim
        self.q, self.k, self.v = (
            torch.randn(*size, dim, generator=generator).to(self.dtype)
            for size in ((len(self.lengths), heads[0]), *2 * [(len(self.lengths), rows, heads[1])])
        )

    def run(self, chosen: list[int], seed: int = 0, softcap: float | None = None) -> list:
        """Outputs and LSE of some of them, whose blocks lie as the seed says."""
        columns, count = -(-max(self.lengths) // BLOCK), len(self.lengths)
        host = np.random.default_rng(seed).permutation(count * columns).astype(np.int32)
        host = host.reshape(count, columns)[chosen]
        slots = (host[:, :, None] * BLOCK + np.arange(BLOCK)).reshape(len(chosen), -1)
        k, v = (torch.zeros(count * columns * BLOCK, *each.shape[2:]) for each in (self.k, self.v))
        k, v = k.to(self.dtype), v.to(self.dtype)
        for sequence, at in zip(chosen, torch.from_numpy(slots).long(), strict=True):
            k[at[: self.k.shape[1]]] = self.k[sequence]
            v[at[: self.v.shape[1]]] = self.v[sequence]
        used = np.array(self.lengths)[chosen]
        keys = PagedKeys(torch.from_numpy(host), host, np.zeros_like(used), used, BLOCK)
        edges = torch.arange(len(chosen) + 1).int()
        tasks = KernelTasks(edges, edges, False, None, self.head_dim**-0.5, softcap)
        return list(select_kernel("cpu").forward_paged(self.q[chosen], k, v, tasks, keys))

    def expected(self, softcap: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The same in double precision."""
        outs, lses = [], []
        for number, length in enumerate(self.lengths):
            k, v = (
                each[number, :length].double().repeat_interleave(3, dim=1)
                for each in (self.k, self.v)
            )
            scores = torch.einsum("hd,khd->hk", self.q[number].double(), k) * self.head_dim**-0.5
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            lses.append(scores.logsumexp(-1))
            outs.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v))
        return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("head_dim", [16, 32, 64, 72, 128])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decodes_of_sequences_of_several_pieces(head_dim, softcap, dtype) -> None:
    decodes = Decodes(dtype, head_dim)
    out, lse = decodes.run([0, 1, 2, 3, 4], softcap=softcap)
    expected, expected_lse = decodes.expected(softcap)
    assert out.dtype == dtype
    # bfloat16 has 8 bits: half of its last one.
    assert_close(out, expected, 1e-6 if dtype == torch.float32 else 2**-8)
    assert_close(lse, expected_lse, 1e-6)


def test_a_decode_depends_on_its_own_rows_alone(monkeypatch) -> None:
    """Not on where they lie, on others, nor on threads: to the bit."""
    decodes = Decodes()
    everything = [0, 1, 2, 3, 4]
    out, lse = decodes.run(everything)
    monkeypatch.setattr(paged_cpu, "_WORK_OF_A_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for chosen, seed in (([0], 1), ([4, 2], 2), (everything, 3)):
        other_out, other_lse = decodes.run(chosen, seed)
        assert torch.equal(other_out, out[chosen])
        assert torch.equal(other_lse, lse[chosen])


def test_what_is_not_finite_stays_so() -> None:
    decodes = Decodes()
    decodes.k[1, 2, 0, 5] = torch.nan
    decodes.v[2, 127, 1, 3] = torch.inf
    out, lse = decodes.run([0, 1, 2, 3, 4])
    assert out[1, :3].isnan().all()
    assert lse[1, :3].isnan().all()
    assert out[2, 3:, 3].isinf().all()
    finite = out.isfinite()
    finite[1, :3] = finite[2, 3:, 3] = True
    assert finite.all()


def test_rows_may_lie_apart() -> None:
    """Those of keys and values, of queries, and of the results."""
    decodes, (out, lse) = Decodes(), Decodes().run([0, 1])
    columns = 175
    host = np.arange(2 * columns, dtype=np.int32).reshape(2, columns)
    k, v = (torch.randn(columns * 2 * BLOCK, 3, 32)[:, :2] for _ in range(2))
    for sequence in (0, 1):
        begin = sequence * columns * BLOCK
        k[begin : begin + 700], v[begin : begin + 700] = decodes.k[sequence], decodes.v[sequence]
    used, edges = np.array(decodes.lengths[:2]), torch.arange(3).int()
    keys = PagedKeys(torch.from_numpy(host), host, np.zeros_like(used), used, BLOCK)
    q, into = torch.zeros(2, 8, 32)[:, :6], (torch.zeros(2, 7, 32)[:, :6], torch.zeros(2, 9)[:, :6])
    q.copy_(decodes.q[:2])
    tasks = KernelTasks(edges, edges, False, None, 32**-0.5)
    select_kernel("cpu").forward_paged(q, k, v, tasks, keys, into)
    assert torch.equal(into[0], out)
    assert torch.equal(into[1], lse)


def test_a_single_head_may_have_any_stride() -> None:
    q, k, v = (torch.randn(1, rows, 32).transpose(0, 1) for rows in (1, 4, 4))
    host, one = np.zeros((1, 1), dtype=np.int32), np.ones(1, dtype=np.int64)
    keys = PagedKeys(torch.from_numpy(host), host, 0 * one, 3 * one, BLOCK)
    edges = torch.arange(2).int()
    tasks = KernelTasks(edges, edges, False, None, SCALE)
    out, _ = select_kernel("cpu").forward_paged(q, k, v, tasks, keys)
    weights = torch.softmax(SCALE * (k[:3, 0] @ q[0, 0]).double(), 0)
    assert_close(out[0], weights[None] @ v[:3, 0].double(), 1e-6)


def test_without_a_compiler_torch_decodes(monkeypatch, caplog, tmp_path) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    load_paged.cache_clear()
    try:
        decodes = Decodes()
        out, lse = decodes.run([0, 1, 2, 3, 4])
        assert len(caplog.messages) == 1
        assert "slower" in caplog.text
        assert "install one (such as the package g++)" in caplog.text
        expected, expected_lse = decodes.expected()
        assert_close(out, expected, 1e-6)
        assert_close(lse, expected_lse, 1e-6)
        monkeypatch.undo()
        (tmp_path / "paged.cpp").write_text("int main() { return missing; }")
        with pytest.raises(RuntimeError, match="missing"):
            paged_library(tmp_path, tmp_path / "cache")
    finally:
        load_paged.cache_clear()
