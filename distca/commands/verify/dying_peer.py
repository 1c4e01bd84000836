"""Two processes exchange bytes, and one kills itself: the other must not wait for ever.

`python -m distca.commands.verify.dying_peer RANK DEVICE STORE` is one of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from distca.commands.verify.stage import SEND, Fault
from distca.transport import CollectiveTransport
from distca.transport.random_exchanges import Exchanges

PATIENCE = timedelta(seconds=5)
"""Time after which an exchange with a dead peer has failed."""
MOST_WAITED = 60.0
"""Seconds that the other process may take to end: NCCL's watchdog looks now and then."""
_TO_START = 60.0
"""Seconds that a process may start after the other."""
_DIES, _EXCHANGES = 2, 6
_LINES = 40
"""Lines of what a process printed that are kept."""


def lose_a_peer(folder: Path, on_gpus: bool, most_waited: float = MOST_WAITED) -> float:
    """Starts both processes, and waits for the end of the one that does not kill itself.

    Args:
        folder: folder that goes with the stage.
        on_gpus: whether they exchange by NCCL, on the first two GPUs; else by gloo.
        most_waited: seconds that it may take once its peer is dead.

    Returns:
        Seconds until it has ended.

    Raises:
        Fault: it waits on, or ends as if nothing had happened.
    """
    with tempfile.TemporaryDirectory(dir=folder) as place:
        # Tied to this process before they import torch, which takes seconds.
        command = [sys.executable, "-m", "distca.lifetime", str(os.getpid())]
        command += ["distca.commands.verify.dying_peer"]
        told = "cuda" if on_gpus else "cpu", str(Path(place) / "store")
        written = [Path(place) / f"errors of {rank}" for rank in (0, 1)]
        processes: list[subprocess.Popen[bytes]] = []
        for rank in (0, 1):
            with written[rank].open("wb") as errors:
                processes.append(subprocess.Popen([*command, str(rank), *told], stderr=errors))
        try:
            # It starts torch first, and has a GPU to find.
            if processes[1].wait(most_waited + _TO_START) != -signal.SIGKILL:
                raise _cannot_exchange(written)
            begin = time.perf_counter()
            status = processes[0].wait(most_waited)
        except subprocess.TimeoutExpired:
            raise Fault(
                f"a rank waits for {most_waited:g} s and longer for a peer that died",
                "leave TORCH_NCCL_ASYNC_ERROR_HANDLING at its default, or jobs hang when a rank "
                "dies",
                _printed(written),
            ) from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if status == 0:
        raise Fault(
            "a rank goes on without an error after its peer died",
            f"do not train with this transport, and {SEND}",
        )
    return time.perf_counter() - begin


def _cannot_exchange(written: Sequence[Path]) -> Fault:
    """Says why the processes fail before one kills itself."""
    # A peer that finds nobody fails a minute later, by a time limit that says nothing.
    first = next((path for path in written if _last_lines(path)), None)
    why = "" if first is None else f": {_last_lines(first)[-1][:300]}"
    text = f"two ranks cannot exchange bytes in processes of their own{why}"
    return Fault(text, SEND, _printed(written))


def _printed(written: Sequence[Path]) -> str:
    return "".join(
        f"rank {rank} printed:\n" + "\n".join(_last_lines(path)) + "\n"
        for rank, path in enumerate(written)
    )


def _last_lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").strip().splitlines()[-_LINES:]


def main(argv: Sequence[str]) -> None:
    """Exchanges bytes with the other process; rank 1 kills itself between two exchanges."""
    rank, on_gpus, store = int(argv[0]), argv[1] == "cuda", argv[2]
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    file = dist.FileStore(store, 2)  # type: ignore[attr-defined]
    backend = "nccl" if on_gpus else "gloo"
    dist.init_process_group(backend, None, timedelta(seconds=_TO_START), 2, rank, file)
    # On a busy machine one process starts long after the other.
    dist.barrier()
    group = dist.new_group(timeout=PATIENCE)
    assert group is not None
    transport = CollectiveTransport(group, device)

    def die(number: int) -> None:
        if rank == 1 and number == _DIES:
            os.kill(os.getpid(), signal.SIGKILL)

    status = 0
    try:
        Exchanges(transport, before=die).run(_EXCHANGES)
        if on_gpus:
            torch.cuda.synchronize()
    except RuntimeError:
        status = 1
    # Without the goodbyes of the process group.
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
