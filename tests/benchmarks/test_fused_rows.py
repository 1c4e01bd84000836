"""The benchmark of fused kernels does the same both ways; the fused way by stand-ins."""

from __future__ import annotations

import torch

from benchmarks.kernels.fused_rows import differing, main, make_plan, operations
from distca.attention.fused import FusedKernels
from distca.cost.volume import AttentionShape
from distca.runtime.fused_rows import FusedRowKernels
from distca.runtime.row_kernels import TorchRowKernels
from support.simgpu.fused import stand_ins

SHAPE = AttentionShape(heads=4, kv_heads=2, head_dim=8, dtype_bytes=4)


def test_both_ways_do_the_same() -> None:
    kernels = FusedKernels(
        stand_ins(lambda name, reads, writes, call: call(*reads, *writes), lambda each: each)
    )
    ways = TorchRowKernels(), FusedRowKernels(kernels)
    plan = make_plan(4, 64, SHAPE, block=8)
    names = []
    for each in operations(plan, SHAPE, torch.float32, torch.device("cpu")):
        names.append(each.name)
        # Merged outputs may be rounded otherwise in their last bits.
        assert differing(each, ways) <= (0.25 if "merged" in each.name else 0), each.name
    assert len(set(names)) == len(names) >= 7


def test_it_needs_a_gpu(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["fused_rows"])
    assert main() == 1
    assert capsys.readouterr().err == "needs a GPU\n"
