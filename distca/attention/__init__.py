"""Attention kernels: they compute tasks and know nothing of ranks."""

from distca.attention.kernel import Gradients, Kernel, KernelTasks
from distca.attention.paged import PagedKernel

__all__ = [
    "Gradients",
    "Kernel",
    "KernelTasks",
    "PagedKernel",
    "select_kernel",
    "select_kernel_of_heads",
]


def select_kernel(
    device_type: str, head_dim: int = 128, softcaps: bool = False, sm_margin: int = 0
) -> PagedKernel:
    """Makes the fastest kernel that a device runs, of those that are installed.

    Args:
        device_type: "cpu" or "cuda".
        head_dim: elements of a head, by which GPUs' kernels differ.
        softcaps: whether scores have a soft cap, which not all of them have.
        sm_margin: multiprocessors of a GPU that the kernel leaves to others, which FlashAttention 3
            alone can.

    Raises:
        ValueError: no kernel runs there, or an installed package cannot be used.
    """
    if device_type == "cpu":
        from distca.attention.torch_cpu import TorchCpuKernel

        return TorchCpuKernel()
    if device_type == "cuda":
        from distca.attention.choice import load_gpu_kernel

        return load_gpu_kernel(head_dim, softcaps, sm_margin)
    raise ValueError(f"no attention kernel for device {device_type!r}: use cpu or cuda")


def select_kernel_of_heads(
    device_type: str,
    head_dim: int,
    value_dim: int,
    sm_margin: int = 0,
    softcap: float | None = None,
) -> Kernel:
    """Makes the fastest kernel for keys and values whose heads may differ in size.

    Args:
        device_type: "cpu" or "cuda".
        head_dim: elements of a query's and a key's head.
        value_dim: elements of a value's head.
        sm_margin: see `select_kernel`.
        softcap: bound of the scores, which `softcap * tanh(score / softcap)` replaces, or None.

    Raises:
        ValueError: as `select_kernel`.
    """
    largest, capped = max(head_dim, value_dim), softcap is not None
    kernel = select_kernel(device_type, largest, softcaps=capped, sm_margin=sm_margin)
    if softcap is not None:
        from distca.attention.softcap import SoftCapped

        kernel = SoftCapped(kernel, softcap)
    if head_dim == value_dim:
        return kernel
    from distca.attention.filled_heads import FilledHeadsKernel

    return FilledHeadsKernel(kernel)
