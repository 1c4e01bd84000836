"""Runs small jobs on simulated GPUs with changed files, and tells by what a change is seen.

Its argument is a file with a list of changes (`changes.Change`), as JSON. For each it writes a line
to standard output, as JSON: why the change is seen, or an empty text. Ranks are forks of this
process, which has imported what takes long. They import the project's files, of which one is
replaced, or a few.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from support.simgpu.changes import Change
from support.simgpu.forked import import_transformers, run_ranks
from support.simgpu.machine import ROOT

Found = dict[str, Any]
"""What a rank saw: `races` and what is counted may not grow, all else may not change."""
_COUNTED = ("launches", "syncs")


@dataclass(frozen=True)
class Job:
    """A job of some ranks.

    Attributes:
        ranks: ranks, each with a GPU.
        seconds: time after which a change hangs, beside what starts. On a busy machine more, by
            what the code as it is takes.
        run: runs it as one of the ranks: takes its number and the folder that ranks share.
    """

    ranks: int
    seconds: float
    run: Callable[[int, Path], Found]


def _rows(rank: int, folder: Path) -> Found:
    from support.simgpu import sent_rows

    found = sent_rows.main()
    return {"rows": found["rows"], "races": found["races"], "syncs": sum(found["syncs"].values())}


def _answered(
    family: str, lengths: Sequence[int], ranks: int = 2, room: int | None = None
) -> Callable[[int, Path], Found]:
    def run(rank: int, folder: Path) -> Found:
        from distca.inference.small_models import VOCABULARY, save_small_model
        from support.simgpu.answers import answers_of

        model = str(save_small_model(family, folder / str(rank)))
        prompts = [[(7 * n + n * n) % VOCABULARY for n in range(length)] for length in lengths]
        penalties = {"presence": 0.1, "frequency": 0.1, "repetition": 1.1}
        how = True, penalties, room
        found = answers_of(model, rank, ranks, str(folder), prompts, *how)
        steps = found.pop("steps")
        return found | {
            "launches": sum(step["launches"] for step in steps),
            "syncs": sum(sum(step["syncs"].values()) for step in steps),
        }

    return run


_LENGTHS = [*(1, 300, 5, 1, 129, 588), *(200, 700, 124), 1024, *([128] * 8)]
_HALVES = "--seq-length 512 --global-batch-size 8"


def _trained(flags: str) -> Callable[[int, Path], Found]:
    def run(rank: int, folder: Path) -> Found:
        from support.simgpu import training

        words = f"--distca --group-query-attention --num-query-groups 2 {flags}"
        job = training.Job(2, words.split(), _LENGTHS)
        its = training.train_here(job, rank, str(folder / "store"))
        return {
            "losses": its.done.losses,
            "grad_norms": its.done.grad_norms,
            "bytes": its.done.bytes_counted,
            "races": its.races,
            "launches": its.launches,
            "syncs": sum(its.syncs.values()),
        }

    return run


_SECONDS = 60
_PATIENCE = 5
"""How many times as long as that the code as it is may take, and a change as long as it."""
_LAYERS = "--num-layers 4 --pipeline-model-parallel-size 2"
JOBS = {
    "rows": Job(1, 20, _rows),
    # Blocks of 256 tokens: some prompts lie on one rank alone, and some fill one by their answers.
    "answers": Job(2, _SECONDS, _answered("gemma3_text", (300, 5, 804, 510, 509))),
    "alone": Job(1, _SECONDS, _answered("gemma3_text", (300, 5, 804, 510, 509), ranks=1)),
    "little memory": Job(2, _SECONDS, _answered("llama", (300, 5, 804, 510), room=64 << 20)),
    # No key of what windowed layers see of it is on the first rank.
    "one answer": Job(2, _SECONDS, _answered("gemma3_text", (300,))),
    "experts": Job(1, _SECONDS, _answered("gpt_oss", (300, 5), ranks=1)),
    "training": Job(2, _SECONDS, _trained(_HALVES)),
    "graphs": Job(2, _SECONDS, _trained(f"{_HALVES} --distca-cuda-graphs")),
    "stages": Job(2, _SECONDS, _trained(f"--seq-length 1024 --global-batch-size 3 {_LAYERS}")),
    "dedicated": Job(
        2,
        _SECONDS,
        _trained("--seq-length 1024 --global-batch-size 4 --distca-servers dedicated:1"),
    ),
}


class _Replaced(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds some modules' sources elsewhere than in their files."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._files = {
            path.removesuffix(".py").replace("/", "."): (str(ROOT / path), source)
            for path, source in sources.items()
        }

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self._files:
            return None
        return importlib.util.spec_from_loader(name, self, origin=self._files[name][0])

    def exec_module(self, module: ModuleType) -> None:
        module.__file__, source = self._files[module.__name__]
        exec(compile(source, module.__file__, "exec"), module.__dict__)


def run(change: Change, seconds: float) -> list[Found] | str:
    """What the ranks of a job found in that time, or why one failed."""
    name, sources = change
    job = JOBS[name]

    def rank_of_job(rank: int, folder: Path) -> Found:
        sys.meta_path.insert(0, _Replaced(sources))
        return job.run(rank, folder)

    return run_ranks(job.ranks, seconds, rank_of_job)


def seen_by(found: Sequence[Found] | str, expected: Sequence[Found]) -> str:
    """Why a run is not as it should be; empty if it is."""
    if isinstance(found, str):
        return found
    for rank, (its, wanted) in enumerate(zip(found, expected, strict=True)):
        for name, value in its.items():
            if name in _COUNTED:
                wrong = value > wanted[name]
            else:
                wrong = value != ([] if name == "races" else wanted[name])
            if wrong:
                told = value[0] if name == "races" else f"{value}, and not {wanted[name]}"
                return f"rank {rank}: {name}: {str(told)[:160]}"
    return ""


def _import_what_takes_long() -> None:
    for name in ("torch.distributed", "megatron.core.models.gpt", "megatron.training"):
        importlib.import_module(name)
    import_transformers()


def main(changes: Sequence[Change]) -> None:
    """Runs the job of each change."""
    _import_what_takes_long()
    expected: dict[str, list[Found]] = {}
    limits: dict[str, float] = {}
    for change in changes:
        name, _ = change
        if name not in expected:
            begun, seconds = time.monotonic(), JOBS[name].seconds
            ran = run((name, {}), _PATIENCE * seconds)
            limits[name] = max(seconds, _PATIENCE * (time.monotonic() - begun))
            told = seen_by(ran, [] if isinstance(ran, str) else ran)
            assert not told, f"the code as it is: {told}"
            assert not isinstance(ran, str)
            expected[name] = ran
        sys.stdout.write(json.dumps(seen_by(run(change, limits[name]), expected[name])) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
