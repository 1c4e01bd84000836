"""Attention kernels: they compute tasks and know nothing of ranks."""

from distca.attention.kernel import Gradients, Kernel, KernelTasks

__all__ = ["Gradients", "Kernel", "KernelTasks", "select_kernel"]


def select_kernel(device_type: str) -> Kernel:
    """Makes the fastest kernel for a device.

    Args:
        device_type: "cpu" or "cuda".

    Raises:
        ValueError: no kernel supports the device.
    """
    if device_type == "cpu":
        from distca.attention.torch_cpu import TorchCpuKernel

        return TorchCpuKernel()
    if device_type == "cuda":
        from distca.attention.flash import make_flash_kernel

        return make_flash_kernel()
    raise ValueError(f"no attention kernel for device {device_type!r}: use cpu or cuda")
