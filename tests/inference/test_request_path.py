"""The way of an ordinary request through the files, as the tour of `distca.inference` has it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

import distca.inference
from distca.inference.llm import LLM, configure
from distca.inference.models import read_model
from distca.inference.sampling import SamplingParams
from support.small_models import save_small_model

ROOT = Path(__file__).parents[2] / "distca"
FOLDERS = ("inference/", "schedule/serving/", "runtime/serving/")
MOST_FILES = 25
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


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Files and functions that answer a request, in the order in which it meets them."""
    folder = save_small_model("llama", tmp_path_factory.mktemp("models"))
    met: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and Path(code.co_filename).is_relative_to(ROOT):
            met[Path(code.co_filename).relative_to(ROOT).as_posix(), code.co_qualname] = None

    try:
        llm = LLM(configure(read_model(str(folder), torch.float32)))
        sys.setprofile(note)
        try:
            llm.generate([list(range(3, 43))], SamplingParams(max_tokens=3))
        finally:
            sys.setprofile(None)
    finally:
        torch.distributed.destroy_process_group()
    return list(met)


def test_a_request_meets_few_files_and_none_that_has_nothing_to_do_for_it(path) -> None:
    files = {file for file, _ in path if file.startswith(FOLDERS)}
    assert len(files) <= MOST_FILES, sorted(files)
    for idle in ("growing_groups", "moves", "partitions", "cdsp", "csps", "tensor_parallel"):
        assert not [file for file in files if idle in file]


def test_the_tour_has_the_order_of_a_request(path) -> None:
    shown, _ = (distca.inference.__doc__ or "").split("Others:")
    tour = re.findall(r"^\* `(?:\S*/)?(\w+\.py)`", shown, re.M)
    assert tour == [*BEGINS]
    places = [
        [Path(file).name for file, name in path if name == begins] for begins in BEGINS.values()
    ]
    assert places == [[file] for file in BEGINS]
    order = [name for _, name in path if name in BEGINS.values()]
    assert order == [*BEGINS.values()]
