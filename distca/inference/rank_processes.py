"""Ranks of this machine, each a process with an `LLM`, and the calls that they are given.

torchrun starts programs; this starts ranks for a program that goes on by itself, as a command does.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distca.inference.config import EngineConfig
from distca.inference.finite import NotFiniteError
from distca.inference.llm import LLM
from distca.inference.messages import AddRequest
from distca.inference.outputs import Completion, OnToken
from distca.inference.sampling import SamplingParams
from distca.lifetime import start_process
from distca.runtime import Trace
from distca.scratch import ScratchFolder
from distca.timeline import TimelineEvent

_SECONDS_TO_END = 5.0


class RankError(RuntimeError):
    """Raised if a rank failed or ended; the message says which, and why."""


class RankProcesses:
    """Ranks of a model, each a process of this machine, with a GPU each where there are any.

    They end with the process that made them, however it ends.

    Args:
        config: configuration of the engine.
        records: whether ranks record a timeline.

    Raises:
        ValueError: there are fewer GPUs than ranks.
        RankError: a rank cannot start.
    """

    def __init__(self, config: EngineConfig, records: bool = False) -> None:
        count = config.processes
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if 0 < gpus < count:
            raise ValueError(
                f"{count} ranks need a GPU each, but there are {gpus}: use fewer ranks, or "
                "CUDA_VISIBLE_DEVICES= to run on CPUs"
            )
        self._folder = ScratchFolder("distca-ranks-")
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        store = str(self._folder.path / "store")
        try:
            for rank in range(count):
                ours, theirs = Pipe()
                self._pipes.append(ours)
                start_process(self._processes, _serve, config, records, rank, store, pipe=theirs)
            self._collect(lambda *_: None)
        except BaseException:
            self._end_now()
            raise

    @property
    def pids(self) -> list[int]:
        """Numbers of the processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    def answer(
        self,
        prompts: Mapping[int, Sequence[int]],
        sampling: SamplingParams,
        on_token: OnToken = lambda number, token: None,
    ) -> dict[int, Completion]:
        """Answers prompts, as `LLM.answer` does.

        Args:
            prompts: token ids of each, by a number that draws its tokens.
            sampling: choice of tokens.
            on_token: function that is told of each token as it is chosen.

        Raises:
            ValueError: a prompt's keys and values could never be held; nothing has run.
            NotFiniteError: no token can be chosen for a prompt.
            RankError: a rank failed or ended; none is left.
        """
        told = {number: list(tokens) for number, tokens in prompts.items()}
        self._send(("answer", (told, sampling)))
        return self._collect(on_token)[0]  # type: ignore[no-any-return]

    def time_prefill(self, parts: Sequence[int]) -> tuple[float, float]:
        """Feeds a prompt over a chain of ranks, as `LLM.time_prefill` does.

        Args:
            parts: tokens of each rank's part.

        Returns:
            Most CPU seconds of a process, and seconds until the last one has ended.
        """
        self._send(("time prefill", tuple(parts)))
        times = self._collect(lambda *_: None)
        return max(cpu for cpu, _ in times), max(seconds for _, seconds in times)

    def time_group(self, ranks: int, tokens: int) -> float:
        """Feeds a prompt to the first ranks, as `LLM.time_group` does.

        Args:
            ranks: number of ranks.
            tokens: tokens of the prompt.

        Returns:
            Seconds until the last one has ended.
        """
        self._send(("time group", (ranks, tokens)))
        return max(self._collect(lambda *_: None))

    def bytes_moved(self) -> tuple[int, int]:
        """Bytes that all ranks have sent so far: by the plans, and as transports counted them."""
        self._send(("bytes moved", None))
        counts = self._collect(lambda *_: None)
        return counts[0][0], sum(sent for _, sent in counts)

    def timelines(self) -> list[tuple[str, list[TimelineEvent]]]:
        """Name of each rank and its events so far, as `write_trace` takes them."""
        self._send(("timeline", None))
        return self._collect(lambda *_: None)

    def close(self) -> None:
        """Ends all ranks, which have a few seconds to end by themselves."""
        try:
            for pipe in self._pipes:
                pipe.close()
            for process in self._processes:
                process.join(_SECONDS_TO_END)
        finally:
            self._end_now()

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            # Ranks may be busy: nobody waits for what they do.
            self._end_now()

    def _end_now(self) -> None:
        for process in self._processes:
            process.kill()
        # First of all: a signal ends this process soon.
        self._folder.remove()
        self._kill()
        for pipe in self._pipes:
            pipe.close()

    def _send(self, call: tuple[str, object]) -> None:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(call)
            except OSError:
                raise self._ended(rank) from None

    def _collect(self, on_token: OnToken) -> list[Any]:
        """Waits until all ranks have returned, and hands on what they tell meanwhile."""
        results: dict[int, Any] = {}
        refused: ValueError | None = None
        while len(results) < len(self._pipes):
            missing = [rank for rank in range(len(self._pipes)) if rank not in results]
            for ready in wait([self._pipes[rank] for rank in missing]):
                rank = next(r for r in missing if self._pipes[r] is ready)
                try:
                    kind, value = self._pipes[rank].recv()
                except (EOFError, OSError):
                    raise self._ended(rank) from None
                if kind == "token":
                    on_token(*value)
                elif kind == "failed":
                    self._kill()
                    raise RankError(f"rank {rank}: {value}")
                else:
                    results[rank] = value
                    if kind == "refused":
                        refused = ValueError(value)
                    elif kind == "not finite":
                        refused = NotFiniteError(*value)
        if refused:
            raise refused
        return [results[rank] for rank in range(len(self._pipes))]

    def _ended(self, rank: int) -> RankError:
        process = self._processes[rank]
        process.join(_SECONDS_TO_END)
        self._kill()
        code = process.exitcode
        why = ", killed: is there memory left?" if code == -signal.SIGKILL else ""
        return RankError(f"rank {rank} ended with exit code {code}{why}")

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(config: EngineConfig, records: bool, rank: int, store: str, pipe: Connection) -> None:
    """Runs a rank: the main function of its process."""
    try:
        llm, trace = _start(config, records, rank, store)
        pipe.send(("started", None))

        def tell(number: int, token: int) -> None:
            if rank == 0:
                pipe.send(("token", (number, token)))

        while True:
            name, value = pipe.recv()
            if name == "answer":
                prompts, sampling = value
                requests = [AddRequest(n, ids, sampling) for n, ids in prompts.items()]
                try:
                    answers = llm.answer(requests, tell)
                except NotFiniteError as error:
                    # All ranks find that, and go on.
                    pipe.send(("not finite", (error.sequence, error.why)))
                except ValueError as error:
                    # All ranks find that, too, and nothing has run.
                    pipe.send(("refused", str(error)))
                else:
                    pipe.send(("answers", answers if rank == 0 else None))
            elif name == "time prefill":
                pipe.send(("seconds", llm.time_prefill(value)))
            elif name == "time group":
                pipe.send(("seconds", llm.time_group(*value)))
            elif name == "timeline":
                pipe.send(("timeline", (_name(config, rank), trace.take(rank))))
            else:
                pipe.send(("bytes moved", (llm.bytes_planned, llm.bytes_sent)))
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        line = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        pipe.send(("failed", line))


def _start(config: EngineConfig, records: bool, rank: int, store: str) -> tuple[LLM, Trace]:
    """Joins the other ranks, and loads the model."""
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(store, config.processes),  # type: ignore[attr-defined]
        rank=rank,
        world_size=config.processes,
        timeout=timedelta(seconds=config.parallel.step_timeout),
    )
    trace = Trace(device)
    trace.recording = records
    return LLM(config, trace), trace


def _name(config: EngineConfig, rank: int) -> str:
    context, tensor = divmod(rank, config.parallel.tensor_parallel_size)
    return f"rank {rank}: context {context}, tensor {tensor}"
