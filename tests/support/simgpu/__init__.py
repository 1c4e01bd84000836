"""A GPU where there is none: torch's CUDA devices on the host's memory and kernels.

`native/` is a C++ extension that takes over torch's CUDA devices. Tensors have device `cuda:N` and
hold real values, which the CPU's kernels compute. Streams, events, allocations, waits of the host
and the bytes that each operator touches are logged. It shows what an operator on a GPU would refuse
(mixed devices, pageable copies in a capture, too little memory), how many operators are launched,
how often the host waits, and which accesses of two streams nothing orders. It cannot show time, the
real kernels' numbers, memory's fragments, or what NCCL and NVSHMEM do.

`machine.Machine.environment` is the environment in which a Python process, and all that it starts,
has these GPUs. It works with torch's CPU and CUDA builds of the version that the tests have.
"""
