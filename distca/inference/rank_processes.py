"""Ranks of this machine, each a process with an `LLM`, and the calls that they are given.

torchrun starts programs; this starts ranks for a program that goes on by itself, as a command does.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from distca.inference.config import EngineConfig
from distca.inference.llm import LLM
from distca.inference.messages import AddRequest, Completion, OnToken
from distca.inference.sampling import SamplingParams
from distca.lifetime import check_processes, start_process
from distca.runtime import Trace
from distca.scratch import ScratchFolder
from distca.timeline import TimelineEvent

T = TypeVar("T")

_SECONDS_TO_END = 5.0


class RankError(RuntimeError):
    """Raised if a rank failed or ended; the message says which, and why."""


class RankProcesses:
    """Ranks of a model, each a process of this machine, with a GPU each where there are any.

    They end with the process that made them, however it ends.

    Args:
        config: configuration of the engine.
        records: whether ranks record a timeline.

    Attributes:
        capacity: most tokens of a prompt and its answer whose keys and values all ranks can hold.

    Raises:
        ValueError: the machine cannot run that many processes; none has started.
        RankError: a rank cannot start.
    """

    def __init__(self, config: EngineConfig, records: bool = False) -> None:
        count = config.processes
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        check_processes(count, gpus, f"{count} processes of ranks")
        self._folder = ScratchFolder("distca-ranks-")
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        store = str(self._folder.path / "store")
        try:
            for rank in range(count):
                ours, theirs = Pipe()
                self._pipes.append(ours)
                start_process(self._processes, _serve, config, records, rank, store, pipe=theirs)
            # Each tells it as soon as it has started.
            self.capacity: int = self._collect()[0]
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
            on_token: function that is called with each token as it is chosen.

        Raises:
            ValueError: a prompt's keys and values could never be held; nothing has run.
            NotFiniteError: no token can be chosen for a prompt.
            RankError: a rank failed or ended; none is left.
        """
        told = {number: list(tokens) for number, tokens in prompts.items()}
        self._send(_Rank.answer, told, sampling)
        answers: dict[int, Completion] = self._collect(on_token)[0]
        return answers

    def time_prefill(self, parts: Sequence[int]) -> tuple[float, float]:
        """Feeds a prompt over a chain of ranks, as `LLM.time_prefill` does.

        Args:
            parts: tokens of each rank's part.

        Returns:
            Most CPU seconds of a process, and seconds until the last one has ended.
        """
        times = self._call(_Rank.time_prefill, tuple(parts))
        return max(cpu for cpu, _ in times), max(seconds for _, seconds in times)

    def time_group(self, ranks: int, tokens: int) -> float:
        """Feeds a prompt to the first ranks, as `LLM.time_group` does.

        Args:
            ranks: number of ranks.
            tokens: tokens of the prompt.

        Returns:
            Seconds until the last one has ended.
        """
        return max(self._call(_Rank.time_group, ranks, tokens))

    def bytes_moved(self) -> tuple[int, int]:
        """Bytes that all ranks have sent so far: by the plans, and as transports counted them."""
        counts = self._call(_Rank.bytes_moved)
        return counts[0][0], sum(sent for _, sent in counts)

    def timelines(self) -> list[tuple[str, list[TimelineEvent]]]:
        """Name of each rank and its events so far, as `write_trace` takes them."""
        return self._call(_Rank.timeline)

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

    def _call(self, method: Callable[..., T], *args: object) -> list[T]:
        """Calls a method of all ranks; returns what each returns."""
        self._send(method, *args)
        return self._collect()

    def _send(self, method: Callable[..., object], *args: object) -> None:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((method, args))
            except OSError:
                raise self._ended(rank) from None

    def _collect(self, on_token: OnToken = lambda number, token: None) -> list[Any]:
        """Waits until all ranks have returned, and hands on what they tell meanwhile."""
        results: dict[int, Any] = {}
        refused: ValueError | None = None
        while len(results) < len(self._pipes):
            missing = [rank for rank in range(len(self._pipes)) if rank not in results]
            for ready in wait([self._pipes[rank] for rank in missing]):
                rank = next(r for r in missing if self._pipes[r] is ready)
                try:
                    told = self._pipes[rank].recv()
                except (EOFError, OSError):
                    raise self._ended(rank) from None
                match told:
                    case _Token():
                        on_token(*told)
                    case RankError():
                        self._kill()
                        raise RankError(f"rank {rank}: {told}")
                    case ValueError():
                        results[rank], refused = None, told
                    case _:
                        results[rank] = told
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


class _Token(NamedTuple):
    """A token that is reported before the call that asks for it returns."""

    number: int
    token: int


@dataclass(frozen=True)
class _Rank:
    """A rank in its process; `RankProcesses` calls its methods."""

    llm: LLM
    trace: Trace
    name: str
    number: int
    pipe: Connection

    def answer(
        self, prompts: Mapping[int, list[int]], sampling: SamplingParams
    ) -> dict[int, Completion] | None:
        requests = [AddRequest(number, ids, sampling) for number, ids in prompts.items()]
        if self.number:
            # The first one tells what all have.
            self.llm.answer(requests)
            return None
        return self.llm.answer(requests, lambda *told: self.pipe.send(_Token(*told)))

    def time_prefill(self, parts: Sequence[int]) -> tuple[float, float]:
        return self.llm.time_prefill(parts)

    def time_group(self, ranks: int, tokens: int) -> float:
        return self.llm.time_group(ranks, tokens)

    def bytes_moved(self) -> tuple[int, int]:
        return self.llm.bytes_planned, self.llm.bytes_sent

    def timeline(self) -> tuple[str, list[TimelineEvent]]:
        return self.name, self.trace.take(self.number)


def _serve(config: EngineConfig, records: bool, rank: int, store: str, pipe: Connection) -> None:
    """Runs a rank: the main function of its process."""
    try:
        context, tensor = divmod(rank, config.parallel.tensor_parallel_size)
        name = f"rank {rank}: context {context}, tensor {tensor}"
        served = _Rank(*start_rank(config, records, rank, store), name, rank, pipe)
        pipe.send(served.llm.engine.scheduler.capacity)
        while True:
            method, args = pipe.recv()
            try:
                found = method(served, *args)
            except ValueError as error:
                # All ranks find that a prompt is refused, or that logits are not finite, and go on.
                found = error
            pipe.send(found)
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        line = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        pipe.send(RankError(line))


def start_rank(config: EngineConfig, records: bool, rank: int, store: str) -> tuple[LLM, Trace]:
    """Joins the other ranks, and loads the model.

    Args:
        config: configuration of the engine.
        records: whether a timeline is recorded.
        rank: number of this process.
        store: file in which all of them meet.
    """
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
