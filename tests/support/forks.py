"""Processes that are forked from one that has imported torch and Megatron.

The imports take each process several seconds of a core, and training a small model one or two.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPORTED = (
    "torch.distributed.checkpoint",
    "megatron_patches.megatron_lm",
    "megatron_patches.parts",
    "megatron.training.training",
    # With transformers, which takes as long again.
    "megatron.core.tokenizers.text",
    "transformers.models.llama.modeling_llama",
    "distca.inference.rank_processes",
    # What most functions of tests import.
    "pytest",
    "support.training",
    "support.whole_runs",
)


def forking() -> BaseContext:
    """Returns multiprocessing's way to start such processes.

    With a GPU each process imports for itself, as CUDA does not outlive a fork.
    """
    import torch

    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


def start_process(
    started: list[BaseProcess],
    function: Callable[..., object],
    *arguments: object,
    pipe: Connection,
) -> None:
    """Starts a process as `distca.lifetime.start_process` does, with the same arguments.

    It gets signals, and ends with the process that forks.
    """
    process = forking().Process(target=_run, args=(function, arguments, pipe), daemon=True)
    process.start()
    started.append(process)
    pipe.close()


def _run(function: Callable[..., object], arguments: Sequence[object], pipe: Connection) -> None:
    import torch

    from distca.lifetime import end_with_parent

    end_with_parent()
    torch.set_num_threads(1)
    function(*arguments, pipe)


def launch(
    processes: int, arguments: Sequence[str], output: Path, script: str = "pretrain_gpt.py"
) -> BaseProcess:
    """Starts a script on several ranks, which find what torchrun tells them.

    Args:
        processes: number of ranks.
        arguments: arguments of the command.
        output: file that takes what all processes print.
        script: path of the script from the root.

    Returns:
        The launcher's process; its exit code is that of the first rank that failed, or 0.
    """
    # Daemons may have no children.
    launcher = forking().Process(
        target=_launch, args=(processes, [script, *arguments], output), daemon=False
    )
    launcher.start()
    return launcher


def _launch(processes: int, command: Sequence[str], output: Path) -> None:
    from torch.distributed import TCPStore

    with output.open("wb") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    running = {}
    tellers: list[Connection] = []
    for _ in range(processes):
        theirs, teller = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=_train, args=(command, theirs))
        process.start()
        running[process.sentinel] = process
        tellers.append(teller)
    # The store has a thread of its own, whose locks a fork would copy as they are just then.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for rank, teller in enumerate(tellers):
        told = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(store.port),
            "WORLD_SIZE": str(processes),
            "TORCHELASTIC_RUN_ID": "forks",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        teller.send(told | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    code = 0
    while running:
        for sentinel in wait(running):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode and not code:
                code = process.exitcode
                for other in running.values():
                    other.terminate()
    sys.exit(code)


def _train(command: Sequence[str], launcher: Connection) -> None:
    import torch

    # As torchrun's processes do.
    os.setsid()
    torch.set_num_threads(1)
    os.chdir(ROOT)
    os.environ |= launcher.recv()
    sys.argv = [*command]
    runpy.run_path(sys.argv[0], run_name="__main__")
