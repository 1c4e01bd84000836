"""The library as a program uses it: alone, and under torchrun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distca.inference.defaults import configure
from distca.inference.llm import LLM
from distca.inference.messages import RequestOutput
from distca.inference.models import read_model
from distca.inference.sampling import Penalties, SamplingParams
from distca.schedule.serving.cdsp import Coefficients, PrefillModel, Search
from distca.schedule.serving.cdsp.growing import GrowingGroups
from distca.schedule.serving.partitions import Chain
from support.generated import abort_on_a_rank, ask_apart
from support.ranks import Ranks
from support.small_models import save_small_model

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "generating.md"


def program(folder: Path, ranks: int) -> str:
    """The program of the guide, with a model of its own."""
    shown = re.search(r"\n((?:    .*\n|\n)*    import torch\n(?:    .*\n|\n)*)", GUIDE.read_text())
    assert shown is not None
    text = re.sub(r"^    ", "", shown[1], flags=re.M)
    assert "path/to/model" in text
    assert "context_parallel_size=2" in text
    text = text.replace("context_parallel_size=2", f"context_parallel_size={ranks}")
    return text.replace("path/to/model", str(folder))


def run(file: Path, *launcher: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(file)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


THREADS = """
import atexit
import sys
from pathlib import Path


def count():
    names = [(each / "comm").read_text().strip() for each in Path("/proc/self/task").iterdir()]
    sys.stdout.write(f"{names.count('pt_gloo_runloop')} threads\\n")
    sys.stdout.flush()


# The first that is registered runs last.
atexit.register(count)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_threads_of_exchanges_end_before_the_interpreter(tmp_path: Path, ranks: int) -> None:
    """Else it aborts if one of them lets go of a tensor of Python's meanwhile."""
    folder = save_small_model("llama", tmp_path)
    file = tmp_path / "program.py"
    file.write_text(f"{THREADS}\n{program(folder, ranks)}\ncount()\n")
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)
    found = re.findall(r"(\d+) threads", run(file, *(torchrun if ranks > 1 else ())))
    assert found.count("0") == ranks == len(found) - ranks, found


def test_the_guide_s_program_answers_alike_alone_and_under_torchrun(tmp_path: Path) -> None:
    folder = save_small_model("llama", tmp_path)
    for ranks in (1, 2):
        (tmp_path / f"{ranks}.py").write_text(program(folder, ranks))
    alone = run(tmp_path / "1.py").splitlines()
    assert len(alone) == 2
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    both = run(tmp_path / "2.py", *torchrun)
    # Ranks write at the same time, and a line's end apart from the line.
    assert all(both.count(line) == 2 * alone.count(line) for line in alone)
    assert len(both) == 2 * sum(len(line) + 1 for line in alone)


def test_as_many_processes_are_needed_as_are_configured(tmp_path: Path) -> None:
    model = read_model(str(save_small_model("llama", tmp_path)), torch.float32)
    try:
        with pytest.raises(ValueError, match=r"2 processes are needed, and there are 1"):
            LLM(configure(model, context_parallel_size=2))
    finally:
        torch.distributed.destroy_process_group()


def test_a_later_prompt_finds_the_blocks_of_an_earlier_one(tmp_path: Path) -> None:
    model = read_model(str(save_small_model("llama", tmp_path)), torch.float32)
    try:
        llm = LLM(configure(model, block_size=4))
        sampling = SamplingParams(max_tokens=3)
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
        (first,) = llm.generate([prompt], sampling, n=2)
        computed = llm.engine.counts.computed
        told: list[tuple[int, int]] = []
        (again,) = llm.generate([prompt], sampling, on_token=lambda *each: told.append(each))
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        assert told == [(0, token) for token in again.outputs[0].token_ids]
        # The last token of the prompt, which is not of a full block, and those of the answer.
        assert llm.engine.counts.computed - computed == 1 + 2
        with pytest.raises(ValueError, match="more than the model's"):
            llm.generate([prompt, [1] * 10_000_000], sampling)
        assert llm.engine.scheduler.waiting == llm.engine.scheduler.running == 0
    finally:
        torch.distributed.destroy_process_group()


def test_growing_groups_and_chains_exclude_each_other(tmp_path: Path) -> None:
    model = read_model(str(save_small_model("llama", tmp_path)), torch.float32)
    times = PrefillModel("any", "any", {1: Coefficients(0.0, 1.0, 0.0, 0.0)})
    growing = GrowingGroups(Search(times))
    assert configure(model, 2, growing=growing).scheduler.growing is growing
    with pytest.raises(ValueError, match="leave the chain"):
        configure(model, 2, growing=growing, chain=Chain(2, (0.5, 0.5)))


def test_log_probabilities_and_penalties(tmp_path: Path) -> None:
    """Those of tokens and prompts are transformers' own; penalties change the choice."""
    model = read_model(str(save_small_model("llama", tmp_path)), torch.float32)
    try:
        llm = LLM(configure(model, max_num_batched_tokens=64))
        prompt = [(7 * n) % 97 for n in range(100)]
        (done,) = llm.generate(
            [prompt], SamplingParams(max_tokens=5), n=2, logprobs=2, prompt_logprobs=True
        )
        first, second = done.outputs
        loaded = model.load(torch.device("cpu"), "eager")
        with torch.no_grad():
            logits = loaded(torch.tensor([prompt + first.token_ids])).logits[0]
        expected = logits.double().log_softmax(1)
        assert len(first.prompt_logprobs) == len(prompt) - 1
        assert not second.prompt_logprobs
        tokens = prompt[1:] + first.token_ids
        for place, found in enumerate(first.prompt_logprobs + first.logprobs):
            assert found.token == pytest.approx(float(expected[place, tokens[place]]), abs=1e-4)
            assert [token for token, _ in found.top] == expected[place].topk(2).indices.tolist()
        banned = first.token_ids[0]
        without = Penalties(bias=((banned, -100.0),))
        (other,) = llm.generate([prompt], SamplingParams(max_tokens=5), penalties=without)
        assert banned not in other.outputs[0].token_ids
        assert not other.outputs[0].logprobs
    finally:
        torch.distributed.destroy_process_group()


class _StoppedError(Exception):
    """What a program's own function raises."""


def test_a_call_that_fails_leaves_nothing_for_the_next(tmp_path: Path) -> None:
    model = read_model(str(save_small_model("llama", tmp_path)), torch.float32)
    prompts, sampling = [[1, 2, 3, 4, 5], [6, 7]], SamplingParams(max_tokens=4)

    def stops(number: int, token: int) -> None:
        raise _StoppedError

    try:
        llm = LLM(configure(model, block_size=4))
        wanted = [each.outputs[0].token_ids for each in llm.generate(prompts, sampling)]
        forward = llm._worker._run
        for moment in ("told", "computing", "interrupted"):
            error: type[BaseException] = _StoppedError
            if moment == "told":
                call = lambda: llm.generate([[9, 8, 7]], sampling, on_token=stops)  # noqa: E731
            else:
                error = RuntimeError if moment == "computing" else KeyboardInterrupt

                def fails(batch: object, error: type[BaseException] = error) -> None:
                    llm._worker._take_in(batch)  # type: ignore[arg-type]
                    raise error

                llm._worker._run = fails  # type: ignore[assignment, method-assign]
                call = lambda: llm.generate([[9, 8, 7]], sampling)  # noqa: E731
            with pytest.raises(error):
                call()
            llm._worker._run = forward  # type: ignore[method-assign]
            found = [each.outputs[0].token_ids for each in llm.generate(prompts, sampling)]
            assert found == wanted, moment
            assert llm.engine.cache.referenced(0) == 0
    finally:
        torch.distributed.destroy_process_group()


def test_answers_are_aborted_as_they_are_and_others_go_on(tmp_path: Path) -> None:
    model = read_model(str(save_small_model("llama", tmp_path)), torch.float32)
    prompts, sampling = [[1, 2, 3], [4, 5], [6, 7]], SamplingParams(max_tokens=6)
    told: list[int] = []

    def abort(number: int, token: int) -> None:
        told.append(number)
        if told == [0]:
            # One that waits, and is its prompt's first; one that there is not.
            llm.abort(4)
            llm.abort(99)
        if told.count(3) == 2:
            llm.abort(3)

    def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
        return [each.token_ids for one in outputs for each in one.outputs]

    try:
        # The third prompt waits.
        llm = LLM(configure(model, block_size=4, max_num_seqs=2))
        wanted = tokens_of(llm.generate(prompts, sampling, n=2))
        done = llm.generate(prompts, sampling, n=2, on_token=abort)
        assert tokens_of(done) == [*wanted[:3], wanted[3][:2], [], wanted[5]]
        reasons = [each.finish_reason for one in done for each in one.outputs]
        assert reasons == ["length"] * 3 + ["abort"] * 2 + ["length"]
        assert (told.count(3), told.count(4)) == (2, 0)
        assert llm.engine.cache.referenced(0) == 0
        for wrong in ("0", True, 1.0):
            with pytest.raises(ValueError, match="is not the number of an answer"):
                llm.abort(wrong)
        # What is aborted while nothing runs is not of the next call.
        llm.abort(0)
        assert tokens_of(llm.generate(prompts, sampling, n=2)) == wanted
    finally:
        torch.distributed.destroy_process_group()


def test_one_process_aborts_answers_of_all(ranks: Ranks, tmp_path: Path) -> None:
    """One that runs, one that waits, one at its last token; and one that has ended."""
    model = read_model(str(save_small_model("llama", tmp_path)), torch.float32)
    found, other = ranks.run(abort_on_a_rank, model, world_size=2)
    assert found == other
    tokens, reasons = zip(*found, strict=True)
    assert reasons == ("length", "abort", "abort", "abort", *["length"] * 6)
    whole = tokens[5:]
    assert tokens[:5] == (whole[0], whole[1][:2], whole[2][:5], [], whole[4])


def test_answers_end_by_the_models_own_tokens_unless_others_are_given(tmp_path: Path) -> None:
    folder = save_small_model("llama", tmp_path)
    model, prompt = read_model(str(folder), torch.float32), [1, 2, 3]
    try:
        llm = LLM(configure(model))
        (free,) = llm.generate([prompt], SamplingParams(max_tokens=6))
        ids = free.outputs[0].token_ids
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids[2]}))
        until = ids.index(ids[2]) + 1
        llm = LLM(configure(read_model(str(folder), torch.float32)))
        for stops, length, reason in (
            (None, until, "stop"),
            (frozenset(), 6, "length"),
            (frozenset({ids[0]}), 1, "stop"),
        ):
            (done,) = llm.generate([prompt], SamplingParams(max_tokens=6, stops=stops))
            assert done.outputs[0].token_ids == ids[:length]
            assert done.outputs[0].finish_reason == reason
        # Fewest tokens keep the model's own away, too.
        (done,) = llm.generate(
            [prompt], SamplingParams(max_tokens=6), penalties=Penalties(fewest=6)
        )
        assert ids[2] not in done.outputs[0].token_ids[:5]
        assert len(done.outputs[0].token_ids) == 6
    finally:
        torch.distributed.destroy_process_group()


def test_what_cannot_be_answered_is_refused_before_anything_runs(tmp_path: Path) -> None:
    model = read_model(str(save_small_model("llama", tmp_path)), torch.float32)
    few, most = SamplingParams(max_tokens=2), model.positions
    try:
        llm = LLM(configure(model, block_size=4))
        for prompts, sampling, more, message in (
            ([[1], []], few, {}, "prompt 1 is empty"),
            ([[1, model.vocab_size]], few, {}, "prompt 0 has the token"),
            ([[1, -1]], few, {}, "prompt 0 has the token -1"),
            ([[1, 2**70]], few, {}, "prompt 0 has the token"),
            ([[1], [1.5]], few, {}, "prompt 1 has something else than whole numbers"),
            (["abc"], few, {}, "prompt 0 has something else"),
            ([[1]], few, {"penalties": Penalties(bias=((-1, 1.0),))}, "penalties name the token"),
            ([[1]], replace(few, stops=frozenset({-1})), {}, "stops name the token -1, but"),
            ([[1]], replace(few, stops=frozenset({10**6})), {}, "stops name the token 1000000"),
            ([[1]], few, {"logprobs": 2.5}, "log-probabilities of 2.5"),
            ([[1] * (most - 1)], few, {}, "more than the model's"),
            ([[1]], SamplingParams(max_tokens=0), {}, "0 tokens of an answer"),
            ([[1]], few, {"n": 0}, "0 answers"),
            ([[1]], few, {"n": 1.5}, "1.5 answers"),
            ([[1]], few, {"logprobs": -1}, "log-probabilities of -1"),
        ):
            with pytest.raises(ValueError, match=message):
                llm.generate(prompts, sampling, **more)  # type: ignore[arg-type]
        assert not llm.engine.counts.iterations
        (answered,) = llm.generate([[1] * (most - 2)], few)
        assert len(answered.outputs[0].token_ids) == 2
        # From what hears of tokens, too; the next call answers again.
        with pytest.raises(RuntimeError, match="on_token cannot call generate"):
            llm.generate([[1]], few, on_token=lambda number, token: llm.generate([[1]]))
        (again,) = llm.generate([[1] * (most - 2)], few)
        assert again.outputs[0].token_ids == answered.outputs[0].token_ids
        (likeliest,) = llm.generate([[1, 2]])
        assert len(likeliest.outputs[0].token_ids) == SamplingParams().max_tokens
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"context_parallel_size": 0},
            "context_parallel_size=0: give a whole",
        ),
        ({"block_size": 0}, "block_size=0: give a whole number of at least 1"),
        ({"block_size": 2.5}, "block_size=2.5: give a whole number of at least 1"),
        ({"cache_bytes": 0}, "cache_bytes=0: give a whole number of at least 1"),
        ({"attention_servers": -1}, "attention_servers=-1: give a whole number of at least 0"),
        ({"max_num_seqs": 0}, "max_num_seqs=0: give a whole number of at least 1"),
        ({"stripe": -16}, "stripe=-16: give a whole number of at least 1"),
        ({"strategy": "nope"}, "strategy='nope': give one of pass-kv, pass-q, "),
        ({"strategy": "tiles", "evens_out": True}, "ranks that have equal shares keep their own"),
        ({"strategy": "tiles", "chain": Chain(1, (1.0,))}, "a chain shares it out: leave one"),
        ({"transport": "nope"}, "transport='nope': give one of gloo, nccl, "),
        ({"cache_bytes": 5}, "cache_bytes=5 is less than a block of 16 tokens, which takes"),
        ({"gpu_utilization": 9}, "gpu_utilization=9: give a part of 1"),
        ({"step_timeout": -1.0}, "step_timeout=-1.0: give more than 0 seconds"),
    ],
)
def test_numbers_of_the_configuration_are_checked(
    tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    model = read_model(str(save_small_model("llama", tmp_path)), torch.float32)
    with pytest.raises(ValueError, match=line):
        configure(model, **changes)


@pytest.mark.parametrize(
    "changes",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0},
     {"top_p": 1.5}, {"min_p": -0.1}, {"max_tokens": -1}, {"max_tokens": 2.5},
     {"temperature": "1"}, {"top_p": float("nan")}, {"top_k": 1.5}],
)  # fmt: skip
def test_numbers_of_the_choice_are_checked(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(changes))} is "):
        SamplingParams(**changes)  # type: ignore[arg-type]


def test_calls_that_differ_between_processes_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    model = read_model(str(save_small_model("llama", tmp_path)), torch.float32)
    (said, tokens), others = ranks.run(ask_apart, model, world_size=2)
    assert others == (said, tokens)
    assert len(said) == 4
    assert all("process 1 asks for other answers than process 0" in each for each in said)
    assert [len(each) for each in tokens] == [3, 3]


@pytest.mark.parametrize(
    "changes",
    [{"repetition": 0.0}, {"repetition": float("nan")}, {"presence": float("inf")},
     {"fewest": -1}, {"bias": ((3, float("nan")),)}],
)  # fmt: skip
def test_numbers_of_penalties_are_checked(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(changes))} "):
        Penalties(**changes)


def test_an_answer_has_its_fewest_tokens_before_it_may_stop(tmp_path: Path) -> None:
    model = read_model(str(save_small_model("llama", tmp_path)), torch.float32)
    try:
        llm = LLM(configure(model, block_size=4))
        (free,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
        stops = frozenset(free.outputs[0].token_ids)
        sampling = SamplingParams(max_tokens=4, stops=stops)
        (answered,) = llm.generate([[1, 2, 3]], sampling, penalties=Penalties(fewest=3))
        assert len(answered.outputs[0].token_ids) >= 3
        assert not stops & {*answered.outputs[0].token_ids[:3]}
    finally:
        torch.distributed.destroy_process_group()
