"""The processes of the ranks that answer together, and the calls that they are given."""

from __future__ import annotations

import signal
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distca.inference.finite import NotFiniteError
from distca.inference.generation import Answer, Generator
from distca.inference.models import ServedModel
from distca.inference.pool_size import NoRoom, PoolSize, Sharing
from distca.inference.sampling import SamplingParams
from distca.lifetime import start_process
from distca.schedule.serving.layer_plans import PrefillStrategy

_TIMEOUT = timedelta(minutes=10)
_SECONDS_TO_END = 5.0


@dataclass(frozen=True)
class RankSettings:
    """What all ranks are told before they load the model.

    Attributes:
        model: model that answers.
        sharing: ranks, and who holds which tokens; each rank is as many processes as share the
            model's layers.
        strategy: what travels in prefills, or who chooses it.
        sampling: choice of tokens.
        keeps_logits: whether answers keep their logits.
        pool: size of each rank's pool of keys and values.
        records: whether ranks record a timeline.
        enforce_eager: whether GPUs decode without CUDA graphs.
    """

    model: ServedModel
    sharing: Sharing
    strategy: PrefillStrategy
    sampling: SamplingParams
    keeps_logits: bool = False
    pool: PoolSize = field(default_factory=PoolSize)
    records: bool = False
    enforce_eager: bool = False

    @property
    def processes(self) -> int:
        """Processes of all ranks."""
        return self.sharing.world_size * self.model.tensor_parallel_size


class RankError(RuntimeError):
    """Raised if a rank failed or ended; the message says which, and why."""


class RankProcesses:
    """Ranks of a model, each a process of this machine, with a GPU each where there are any.

    They end with the process that made them, however it ends.

    Args:
        settings: what they run.

    Raises:
        ValueError: there are fewer GPUs than ranks.
        RankError: a rank cannot start.
    """

    def __init__(self, settings: RankSettings) -> None:
        count = settings.processes
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if 0 < gpus < count:
            raise ValueError(
                f"{count} ranks need a GPU each, but there are {gpus}: use fewer ranks, or "
                "CUDA_VISIBLE_DEVICES= to run on CPUs"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="distca-ranks-")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        store = str(Path(self._folder.name) / "store")
        try:
            for rank in range(count):
                ours, theirs = Pipe()
                self._pipes.append(ours)
                start_process(self._processes, _serve, settings, rank, store, pipe=theirs)
            self._collect(lambda *_: None)
        except BaseException:
            self._end_now()
            raise

    @property
    def pids(self) -> list[int]:
        """Numbers of the processes."""
        return [int(process.pid) for process in self._processes]

    def answer(
        self,
        new: Mapping[int, Sequence[int]],
        told: Callable[[int, int], None] = lambda sequence, token: None,
    ) -> dict[int, Answer]:
        """Answers as `Generator.answer` does.

        Args:
            new: tokens of each sequence that follow those that are held.
            told: function that is told of each token as it is chosen, with its sequence.

        Raises:
            NoRoom: keys and values do not fit into the ranks' pools.
            NotFiniteError: no token can be chosen for a sequence.
            RankError: a rank failed or ended; none is left.
        """
        self._send(("answer", {sequence: list(tokens) for sequence, tokens in new.items()}))
        return self._collect(told)[0]  # type: ignore[no-any-return]

    def time_prefill(self, parts: Sequence[int]) -> tuple[float, float]:
        """Feeds a prompt over a chain of ranks, as `Generator.time_prefill` does.

        Args:
            parts: tokens of each rank's part.

        Returns:
            Most CPU seconds of a process, and seconds until the last one has ended.
        """
        self._send(("time prefill", tuple(parts)))
        found = self._collect(lambda *_: None)
        return max(cpu for cpu, _ in found), max(seconds for _, seconds in found)

    def drop(self, sequence: int) -> None:
        """Frees the keys and values of a sequence."""
        self._send(("drop", sequence))
        self._collect(lambda *_: None)

    def bytes_moved(self) -> tuple[int, int]:
        """Bytes that all ranks have sent so far: by the plans, and as transports counted them."""
        self._send(("bytes moved", None))
        found = self._collect(lambda *_: None)
        return found[0][0], sum(sent for _, sent in found)

    def timelines(self) -> list[tuple[str, list[dict[str, Any]]]]:
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
        self._kill()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def _send(self, call: tuple[str, Any]) -> None:
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(call)
            except OSError:
                raise self._ended(rank) from None

    def _collect(self, told: Callable[[int, int], None]) -> list[Any]:
        """Waits until all ranks have returned, and hands on what they tell meanwhile."""
        results: dict[int, Any] = {}
        refused: NoRoom | NotFiniteError | None = None
        while len(results) < len(self._pipes):
            missing = [rank for rank in range(len(self._pipes)) if rank not in results]
            for ready in wait([self._pipes[rank] for rank in missing]):
                rank = next(r for r in missing if self._pipes[r] is ready)
                try:
                    kind, value = self._pipes[rank].recv()
                except (EOFError, OSError):
                    raise self._ended(rank) from None
                if kind == "token":
                    told(*value)
                elif kind == "failed":
                    self._kill()
                    raise RankError(f"rank {rank}: {value}")
                else:
                    results[rank] = value
                    if kind == "refused":
                        refused = NoRoom(value)
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


def _serve(settings: RankSettings, rank: int, store: str, pipe: Connection) -> None:
    """Runs a rank: the main function of its process."""
    try:
        generator, sent, trace = _start(settings, rank, store, pipe)
        pipe.send(("started", None))
        while True:
            name, value = pipe.recv()
            if name == "answer":
                try:
                    answers = generator.answer(value)
                except NoRoom as error:
                    # All ranks find that alike, and nothing has run.
                    pipe.send(("refused", str(error)))
                    continue
                except NotFiniteError as error:
                    # All ranks find that alike, too.
                    pipe.send(("not finite", (error.sequence, error.why)))
                    continue
                pipe.send(("answers", answers if rank == 0 else None))
            elif name == "time prefill":
                pipe.send(("seconds", generator.time_prefill(value)))
            elif name == "drop":
                generator.drop(value)
                pipe.send(("dropped", None))
            elif name == "timeline":
                pipe.send(("timeline", (_name(settings, rank), trace.take(rank))))
            else:
                pipe.send(("bytes moved", (generator.bytes_planned, sent())))
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        line = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        pipe.send(("failed", line))


def _start(
    settings: RankSettings, rank: int, store: str, pipe: Connection
) -> tuple[Generator, Callable[[], int], Any]:
    """Joins the other ranks, and loads the model; tells bytes that the rank has sent, too."""
    from distca.attention import select_kernel
    from distca.cost.step_memory import STEP_SLOTS
    from distca.inference.cuda_graphs import capture_for
    from distca.inference.model_runner import ModelRunner
    from distca.inference.sequence_parallel import share_rows
    from distca.inference.tensor_parallel import join_ranks
    from distca.runtime import Buffers, CoreAttention, Trace
    from distca.transport import CollectiveTransport

    model = settings.model
    world_size = settings.processes
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(store, world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
    )
    group, tensor_ranks = join_ranks(model.tensor_parallel_size, _TIMEOUT)
    transport = CollectiveTransport(group, device, members_only=True)
    if settings.sharing.split is not None:
        tensor_ranks = share_rows(tensor_ranks, settings.sharing.split, device, _TIMEOUT)
    kernel = select_kernel(device.type, model.shape.head_dim, model.softcap is not None)
    buffers = Buffers(device, max(STEP_SLOTS, len(model.masks)))
    trace = Trace(device)
    trace.recording = settings.records
    core = CoreAttention(transport, kernel, buffers, trace=trace)

    def tell(sequence: int, token: int) -> None:
        if rank == 0:
            pipe.send(("token", (sequence, token)))

    generator = Generator(
        model,
        ModelRunner(
            model,
            core,
            device,
            settings.pool.blocks,
            settings.pool.block_size,
            tensor_ranks,
            capture_for(model, device, settings.enforce_eager),
        ),
        settings.pool.planner(model, settings.sharing),
        settings.strategy,
        settings.sampling,
        settings.keeps_logits,
        tell,
        trace,
    )

    def sent() -> int:
        return sum(transport.bytes_sent.values()) + tensor_ranks.bytes_sent

    return generator, sent, trace


def _name(settings: RankSettings, rank: int) -> str:
    context, tensor = divmod(rank, settings.model.tensor_parallel_size)
    return f"rank {rank}: context {context}, tensor {tensor}"
