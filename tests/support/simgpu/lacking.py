"""Operators of GPUs that torch's CPU build has no kernels for, as stand-ins for the devices."""

from __future__ import annotations

from typing import Any

_libraries: list[Any] = []


def launch(native: Any, name: str, reads: Any, writes: Any, call: Any) -> None:
    """Runs `call` with the CPU's views of all tensors, now and whenever its graph is replayed."""
    native.launch(name, reads, writes, lambda: call(*map(native.as_cpu, (*reads, *writes))))


def install(native: Any) -> None:
    """Registers them for the simulated devices."""
    import torch

    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)

    def matmul(a: Any, b: Any, out_dtype: Any) -> Any:
        out = torch.empty(len(a), b.shape[1], dtype=out_dtype, device=a.device)

        def call(a: Any, b: Any, out: Any) -> None:
            out.copy_(a.float() @ b.float())

        launch(native, "aten::mm.dtype", [a, b], [out], call)
        return out

    def histogram(x: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
        out = torch.empty(bins, dtype=x.dtype, device=x.device)

        def call(x: Any, out: Any) -> None:
            out.copy_(torch.histc(x.float(), bins, min, max))

        launch(native, "aten::histc", [x], [out], call)
        return out

    def rms_norm_backward(
        dy: Any, x: Any, shape: Any, rstd: Any, weight: Any, wanted: Any
    ) -> tuple[Any, Any]:
        dx = torch.empty_like(x)
        dweight = None if weight is None else torch.empty_like(weight)
        weights = [] if weight is None else [weight]

        def call(dy: Any, x: Any, rstd: Any, *rest: Any) -> None:
            *given, into = rest[: len(weights) + 1]
            dy, x = dy.float(), x.float()
            normed = x * rstd
            scaled = dy * given[0].float() if given else dy
            last = tuple(range(-len(shape), 0))
            mean = (scaled * normed).mean(last, keepdim=True)
            into.copy_((scaled - normed * mean) * rstd)
            for its in rest[len(weights) + 1 :]:
                its.copy_((dy * normed).reshape(-1, *shape).sum(0))

        made = [dx] if dweight is None else [dx, dweight]
        launch(native, "aten::_fused_rms_norm_backward", [dy, x, rstd, *weights], made, call)
        return dx if wanted[0] else None, dweight if wanted[1] else None

    for name, call in (
        ("mm.dtype", matmul),
        ("histc", histogram),
        ("_fused_rms_norm_backward", rms_norm_backward),
    ):
        library.impl(name, call, "CUDA")
