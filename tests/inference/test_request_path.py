"""The way of an ordinary request through the files, as the tour of `distca.inference` has it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

import distca.inference
from distca.inference.defaults import configure
from distca.inference.llm import LLM
from distca.inference.models import read_model
from distca.inference.sampling import SamplingParams
from support.ranks import Ranks
from support.small_models import save_small_model

ROOT = Path(__file__).parents[2] / "distca"
TOUR, OTHERS = (distca.inference.__doc__ or "").split("Others:")
# What a reader of each file of the tour looks for first.
BEGINS = {
    "llm.py": "LLM.generate",
    "engine.py": "Engine.schedule",
    "scheduler.py": "Scheduler.schedule",
    "worker.py": "Worker.execute",
    "iteration.py": "plan_iteration",
    "model_runner.py": "ModelRunner.run_batch",
    "attention_runner.py": "AttentionRunner.begin",
}

OWN = "inference/", "schedule/serving/", "runtime/serving/"
"""Folders that only inference has."""

Path_ = list[tuple[str, str]]
"""Files and functions, in the order in which a request meets them."""


def path_on_a_rank(folder: str, ranks: int) -> Path_:
    """Answers a request on some ranks; returns what it meets in this process."""
    met: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and Path(code.co_filename).is_relative_to(ROOT):
            met[Path(code.co_filename).relative_to(ROOT).as_posix(), code.co_qualname] = None

    llm = LLM(configure(read_model(folder, torch.float32), ranks))
    # Kernels are loaded with the first request.
    llm.generate([list(range(60, 90))], SamplingParams(max_tokens=3))
    sys.setprofile(note)
    try:
        llm.generate([list(range(3, 43))], SamplingParams(max_tokens=3))
    finally:
        sys.setprofile(None)
    return list(met)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_small_model("llama", tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def path(folder: str) -> Path_:
    try:
        return path_on_a_rank(folder, 1)
    finally:
        torch.distributed.destroy_process_group()


def test_the_tour_tells_how_many_files_a_request_passes(
    ranks: Ranks, folder: str, path: Path_
) -> None:
    """All of ours, on one rank and on two; and which of the first are inference's own."""
    told = re.search(
        r"passes (\d+) files of `distca` on one rank on CPUs, and (\d+) on two.\n"
        r"Inference's own are (\d+) of the (\d+): .* The other (\d+) are",
        TOUR,
        re.DOTALL,
    )
    assert told is not None
    files = {file for file, _ in path}
    both = [
        {file for file, _ in each} for each in ranks.run(path_on_a_rank, folder, 2, world_size=2)
    ]
    own = {file for file in files if file.startswith(OWN)}
    counts = [len(files), len(set.union(*both)), len(own), len(files), len(files - own)]
    assert [*map(int, told.groups())] == counts
    # What has nothing to do for it is not met.
    for idle in ("growing_groups", "moves", "partitions", "cdsp", "csps", "tensor_parallel"):
        assert not [file for file in files if idle in file]


def test_the_tour_has_the_order_of_a_request(path: Path_) -> None:
    tour = re.findall(r"^\* `(?:\S*/)?(\w+\.py)`", TOUR, re.M)
    assert tour == [*BEGINS]
    places = [
        [Path(file).name for file, name in path if name == begins] for begins in BEGINS.values()
    ]
    assert places == [[file] for file in BEGINS]
    order = [name for _, name in path if name in BEGINS.values()]
    assert order == [*BEGINS.values()]


def test_what_the_tour_names_is_there() -> None:
    """Files, and classes, methods and functions, each in one of our files."""
    sources = [each.read_text() for each in ROOT.rglob("*.py")]
    text = TOUR + OTHERS
    for file in re.findall(r"`((?:distca/)?[\w/]+\.py)`", text):
        assert (ROOT.parent / file).is_file() or (ROOT / "inference" / file).is_file(), file
    for kind, member in re.findall(r"`([A-Z]\w+)\.(\w+)`", text):
        of_kind = [each for each in sources if re.search(rf"^class {kind}\b", each, re.M)]
        defines = re.compile(rf"^    (def )?{member}\b|self\.{member}\b", re.M)
        assert any(map(defines.search, of_kind)), (kind, member)
    for name in re.findall(r"`([a-z]\w+)`", text):
        defines = re.compile(rf"^ *(def {name}\(|{name}: )", re.M)
        assert any(map(defines.search, sources)), name
