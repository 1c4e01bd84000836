"""The kernels against attention as it is defined."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from distca.attention import KernelTasks, select_kernel, select_kernel_of_heads
from distca.attention.merge import merge_partial
from distca.attention.paged import PagedKeys
from distca.attention.reference import document_visibility
from distca.cost.kernel_memory import result_row_bytes, temporary_row_bytes
from distca.cost.volume import AttentionShape
from support.attention_cases import CASES, SCALE, assert_close, make_inputs, reference


@pytest.mark.parametrize(("name", "case", "causal", "window"), CASES, ids=[c[0] for c in CASES])
@pytest.mark.parametrize(
    ("heads", "softcap"),
    [
        ((4, 4, 16, 16), None),
        ((4, 2, 24, 24), None),
        ((6, 1, 8, 8), None),
        ((2, 2, 24, 16), None),
        ((2, 1, 8, 16), None),
        ((4, 2, 16, 16), 2.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_kernel(name, case, causal, window, heads, softcap, dtype) -> None:
    """Also values with heads of other sizes than those of keys."""
    *of_keys, value_dim = heads
    tensors, edges = make_inputs(case, *of_keys, dtype, value_dim)
    q, k, v, dout = tensors
    kernel = select_kernel_of_heads("cpu", q.shape[2], value_dim)
    tasks = KernelTasks(*edges, causal, window, SCALE, softcap)
    out, lse = kernel.forward(q, k, v, tasks)
    assert out.is_contiguous()
    again = torch.full_like(out, 7), torch.full_like(lse, 7)
    assert kernel.forward(q, k, v, tasks, again)[0] is again[0]
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], lse)
    apart = tuple(torch.full((len(x), 2, *x.shape[1:]), 7, dtype=dtype)[:, 0] for x in (q, k, v))
    gradients = kernel.backward(dout, q, k, v, out, lse, tasks, apart)
    assert all(given is found for given, found in zip(apart, gradients, strict=True))
    expected_out, expected_lse, expected_gradients = reference(
        tensors, edges, causal, window, softcap
    )
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    tolerance = 3e-6 if dtype == torch.float32 else 3e-2
    assert_close(out, expected_out, tolerance)
    assert_close(lse, expected_lse, tolerance)
    for found, expected in zip(gradients, expected_gradients, strict=True):
        assert_close(found, expected, tolerance)


@pytest.mark.parametrize("seed", range(8))
def test_partial_tasks_merge_to_the_whole(seed: int) -> None:
    """Keys cut anywhere: outputs merge by LSE, and the parts' gradients add up."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 90))
    tensors, edges = make_inputs([(n, n)], 4, 2, 8, torch.float32)
    q, k, v, dout = tensors
    softcap = (None, 2.0)[seed % 2]
    expected_out, expected_lse, expected = reference(tensors, edges, True, None, softcap)
    start = int(rng.integers(0, n))
    cuts = sorted({0, *map(int, rng.integers(0, start + 1, size=3)), start})
    kernel = select_kernel("cpu")
    rows = torch.arange(start, n)
    out, lse = torch.zeros(n - start, 4, 8), torch.full((n - start, 4), float("-inf"))
    parts = [(a, b, False) for a, b in itertools.pairwise(cuts)] + [(start, n, True)]

    def call(name, a, b, causal, *arguments):
        cu = (torch.tensor([0, x], dtype=torch.int32) for x in (n - start, b - a))
        tasks = KernelTasks(*cu, causal, None, SCALE, softcap)
        return getattr(kernel, name)(*arguments, tasks)

    for a, b, causal in parts:
        part = call("forward", a, b, causal, q[rows], k[a:b], v[a:b])
        merge_partial(out, lse, slice(0, n - start), *part)
    assert_close(out, expected_out[start:], 3e-6)
    assert_close(lse, expected_lse[start:], 3e-6)
    dq, dk = torch.zeros_like(q[rows]), torch.zeros_like(k)
    for a, b, causal in parts:
        inputs = (dout[rows], q[rows], k[a:b], v[a:b], out, lse)
        part_dq, part_dk, _ = call("backward", a, b, causal, *inputs)
        dq += part_dq
        dk[a:b] += part_dk
    assert_close(dq, expected[0][start:], 5e-6)


def test_merging_nothing_with_nothing() -> None:
    out, lse = torch.zeros(2, 1, 4), torch.full((2, 1), float("-inf"))
    merge_partial(out, lse, slice(0, 2), torch.zeros(2, 1, 4), torch.full((2, 1), float("-inf")))
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


def test_torch_flash_calls_fit_the_operators() -> None:
    """Nothing here runs on a GPU; on the meta device torch still checks the arguments."""
    from distca.attention.flash import TorchFlashKernel

    q, k = torch.empty(6, 4, 16, device="meta"), torch.empty(9, 2, 16, device="meta")
    q, k = q.bfloat16(), k.bfloat16()
    cu = torch.tensor([0, 6], dtype=torch.int32), torch.tensor([0, 9], dtype=torch.int32)
    for window in (None, 3):
        tasks = KernelTasks(*cu, True, window, SCALE)
        out, lse = TorchFlashKernel().forward(q, k, k, tasks)
        assert out.shape == q.shape
        gradients = TorchFlashKernel().backward(q, q, k, k, out, lse, tasks)
        assert [g.shape for g in gradients] == [q.shape, k.shape, k.shape]
    host = np.zeros((1, 2), dtype=np.int32)
    keys = PagedKeys(torch.from_numpy(host).to("meta"), host, np.array([0]), np.array([300]), 256)
    tasks = KernelTasks(cu[0], torch.tensor([0, 300], dtype=torch.int32), False, None, SCALE)
    pool = q.new_empty(512, 2, 16)
    out, lse = TorchFlashKernel().forward_paged(q, pool, pool, tasks, keys)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:2])


def test_offsets_are_placed_once_for_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    from distca.attention.flash import TorchFlashKernel

    placed = []
    forward = torch.ops.aten._flash_attention_forward

    def seen(*arguments: object, **options: object) -> object:
        placed.append(arguments[3:7])
        return forward(*arguments, **options)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", seen)
    kernel, q = TorchFlashKernel(), torch.empty(6, 4, 16, device="meta", dtype=torch.bfloat16)
    cu = torch.tensor([0, 4, 6], dtype=torch.int32)
    for _ in range(2):
        kernel.forward(q, q, q, KernelTasks(cu, cu, True, None, SCALE))
    (first, *_, longest), (second, *_) = placed
    assert first is second
    assert first.device.type == "meta"
    assert longest == 4
    # Others of the same values are not mistaken for them, and none is kept longer than its call.
    kernel.forward(q, q, q, KernelTasks(cu.clone(), cu, True, None, SCALE))
    assert placed[2][0] is not first
    assert len(kernel._offsets._placed) == 1


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (3, 0), (0, 0)])
def test_nothing_is_launched_without_queries_or_without_keys(queries: int, keys: int) -> None:
    """FlashAttention refuses empty tensors; this machine's CPU would refuse any."""
    from distca.attention.flash import TorchFlashKernel

    q, k, v = torch.ones(queries, 4, 16), torch.ones(keys, 2, 16), torch.ones(keys, 2, 16)
    edges = [torch.tensor([0, n], dtype=torch.int32) for n in (queries, keys)]
    tasks = KernelTasks(edges[0], edges[1], False, None, SCALE)
    out, lse = TorchFlashKernel().forward(q, k, v, tasks)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((queries, 4), float("-inf")))
    gradients = TorchFlashKernel().backward(q, q, k, v, out, lse, tasks)
    for gradient, like in zip(gradients, (q, k, v), strict=True):
        assert torch.equal(gradient, torch.zeros_like(like))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("name", "case", "causal", "window"), CASES, ids=[c[0] for c in CASES])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gpu_kernel(name, case, causal, window, softcap) -> None:
    tensors, edges = make_inputs(case, 4, 2, 64, torch.bfloat16)
    q, k, v, dout = (x.cuda() for x in tensors)
    kernel = select_kernel("cuda", 64, softcap is not None)
    tasks = KernelTasks(*edges, causal, window, SCALE, softcap)
    out, lse = kernel.forward(q, k, v, tasks)
    gradients = kernel.backward(dout, q, k, v, out, lse, tasks)
    expected_out, expected_lse, expected_gradients = reference(
        tensors, edges, causal, window, softcap
    )
    assert_close(out.cpu(), expected_out, 3e-2)
    assert_close(lse.cpu(), expected_lse, 3e-2)
    for found, expected in zip(gradients, expected_gradients, strict=True):
        assert_close(found.cpu(), expected, 3e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [AttentionShape(8, 2, 128), AttentionShape(4, 4, 80)])
def test_a_gpu_kernel_allocates_no_more_than_is_counted(shape: AttentionShape) -> None:
    tensors, edges = make_inputs([(4096, 8192)] * 2, shape.heads, shape.kv_heads, 8, torch.bfloat16)
    q, k, v, dout = (x.repeat(1, 1, shape.head_dim // 8).cuda() for x in tensors)
    kernel, tasks = select_kernel("cuda", shape.head_dim), KernelTasks(*edges, True, None, SCALE)
    call = dout, q, k, v, *kernel.forward(q, k, v, tasks), tasks
    kernel.backward(*call)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kernel.backward(*call)
    taken = torch.cuda.max_memory_allocated() - before
    (q_result, kv_result), (q_more, kv_more) = result_row_bytes(shape), temporary_row_bytes(shape)
    counted = 8192 * q_result + 16384 * (kv_result + kv_more) + (8192 + 2 * 128) * q_more
    assert 0.5 * counted < taken < 1.02 * counted


def test_unknown_device() -> None:
    with pytest.raises(ValueError, match="no attention kernel for device 'tpu'"):
        select_kernel("tpu")


@pytest.mark.parametrize("window", [None, 0, 2])
def test_the_reference_s_visibility(window: int | None) -> None:
    """Two documents of three and two tokens, pair by pair."""
    visible = document_visibility([3, 2], window)
    for i, j in itertools.product(range(5), range(5)):
        together = (i < 3) == (j < 3)
        assert visible[i, j] == (together and j <= i and (window is None or i - j <= window))
