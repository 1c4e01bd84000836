"""The documentation's commands: all are known to their parsers, and those that take less than a
minute are run and print what the pages show.

Seconds that pages show are of a machine and compared by their form; all other figures are exact.
"""

from __future__ import annotations

import contextlib
import glob
import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from distca.commands.main import main as distca_main
from distca.documents.conversations import _conversations
from distca.timeline import write_trace
from support.documented import (
    PAGES,
    ROOT,
    Command,
    all_commands,
    arguments_of,
    check_flags,
    examples_of_help,
    main_of,
    parse_training_flags,
    read_page,
)

COMMANDS = all_commands()
SIMULATED = (
    "distca simulate --distribution pretrain --context 131072 --sequences 32 --model llama-8b "
    "--cluster dgx-h200 --gpus 64"
)
ONE_PLAN = (
    "distca plan --distribution pretrain --servers 16 --tokens-per-server 65536 --model llama-8b "
    "--seed 1 --scheduler {} --plot plan_{}.png"
)
PAPER = "python benchmarks/cluster/paper.py {} --output DIR"
SAVED = "distca plan .*--save plan.json"

# Patterns of whole commands; each command matches one of all these.
RUN = (
    r"distca (doctor|build|prepare .*)",
    r"distca plan (?!--help).*",
    rf"{SIMULATED} --plot advice\.png",
    r"distca simulate prefill .*",
    r"distca profile .* --heads H .*",
    r"python docs/plot_trace\.py .*",
    r"python benchmarks/training/compare_(losses|speeds)\.py .*",
    PAPER.format("(appendix|fig3|fig4|fig6)").replace(".py", r"\.py"),
)
RUN_IF_FULL = (
    r"python benchmarks/kernels/(attention|layer)\.py --output DIR",
    r"python benchmarks/links/transports\.py --output DIR",
    r"python benchmarks/plans/schedulers\.py --output DIR",
    r"python benchmarks/plans/hybrid_cp\.py --output DIR",
    r"python benchmarks/serving/(runahead|context_parallel)\.py --output DIR",
    r"python benchmarks/plans/planning_ahead\.py --output DIR",
    PAPER.format("fig11").replace(".py", r"\.py"),
)
NOT_RUN = {
    r".* --help|(bash )?launch/(local|slurm/\w+)\.sh --dry-run.*": "run when its flags are checked",
    r"distca simulate --exchanges copy-engines": "a part of a command",
    SIMULATED: "run with --plot, as docs/when_it_helps.md has it",
    r"python docs/(make_reference|plot_(?!trace)\w+)\.py.*": "run by test_docs.py",
    r"(source|export) .*": "sets up a shell",
    r"pip install .*|(PYTHON=FILE )?launch/setup\.sh": "downloads packages",
    r"launch/demo\.sh.*": "downloads packages, and trains for minutes",
    r"launch/test\.sh.*": "runs these tests",
    r"sbatch .*": "needs Slurm",
    r"torchrun .* examples/transformers_\w+\.py .*": "test_transformers_examples.py runs it",
    r"torchrun .* examples/rollouts\.py .*": "test_transformers_examples.py runs it",
    r"torchrun (?!.* examples/(transformers_|rollouts|trl_)).*": "needs eight GPUs or nodes",
    r"python -m megatron_patches\.launch .*": "needs several nodes; test_launcher.py has ranks",
    r"python -m megatron_patches\.check_run .*": "run by test_launcher.py",
    r"launch/local\.sh (?!--dry-run).*": "needs GPUs that hold a model of 8B",
    r"pytest tests/.*|compute-sanitizer .*": "needs a GPU",
    r"(CUDA_MODULE_LOADING=EAGER )?python benchmarks/kernels/device_copy\.py": "needs a GPU",
    r"python benchmarks/kernels/fused_rows\.py": "needs a GPU",
    r"python benchmarks/kernels/(attention|layer)\.py --device cuda .*": "needs a GPU",
    r"distca convert .*": "needs a model; test_converted_families.py has some",
    r"distca generate .*": "needs a model; test_generate.py has a small one",
    r"distca verify.*": "test_verify.py runs its stages",
    r"distca simulate --cluster machine.*": "test_verify.py makes a file and simulates with it",
    r"distca report .*": "needs a run; test_report.py has two",
    r"distca tune .*": "needs a model; test_tune.py has a small one",
    r"distca simulate --serving .*": "takes a minute; test_serving_requests.py has a small trace",
    r"distca simulate --model deepseek-v3-like .*": "takes a minute; llama-8b is run",
    r"distca simulate rollouts.*": "takes minutes; test_simulate_rollouts.py has a small job",
    r"(CUDA_VISIBLE_DEVICES=0,1,2,3 )?distca prefill .*": "test_prefill_storm.py has a model",
    r"(python -m )?distca profile --dtype fp32 .* --max-length 8192 .*": "takes minutes",
    r"python benchmarks/kernels/host_cost\.py .*": "takes minutes",
    r"python benchmarks/kernels/launches\.py .*": "reads history; test_launch_counts.py has one",
    r"python benchmarks/training/(throughput|more_ranks|rollouts)\.py.*": "takes minutes",
    r"python benchmarks/cluster/(validate_\w+|dedicated|beside_peers)\.py .*": "minutes",
    r"python benchmarks/cluster/shared_prompts\.py .*": "minutes; its test has a small job",
    r"python benchmarks/(cluster/|serving/)claims\.py": "tests/benchmarks runs what they do",
    r"python benchmarks/remake\.py.*": "tests/benchmarks runs what it does",
    r"python benchmarks/cluster/paper\.py (all|beyond|chains|fig12|table.*|today.*) .*": "hours",
    r"(sudo )?python benchmarks/serving/sparse_prefill\.py .*": "needs root",
    r"python benchmarks/serving/(chain_prefill|layouts|published)\.py .*": "takes minutes",
    r"python benchmarks/serving/(cdsp_(capacity|ablations)|decode_step)\.py .*": "takes minutes",
    r"python benchmarks/serving/(rank_groups|balanced_prompts)\.py .*": "takes minutes",
    r"python benchmarks/serving/ring_prefill\.py .*": "takes minutes",
    r"python benchmarks/serving/(short_prompts|prefill_(ranks|trace))\.py .*": "takes minutes",
    r"python benchmarks/serving/(vllm_(gpus|prefill)|connector_cost)\.py .*": "takes minutes",
    r"python benchmarks/serving/csps_clusters\.py .*": "takes minutes",
    r"python benchmarks/serving/sparse_(degradation|quality)\.py .*": "takes minutes",
    r"python benchmarks/serving/cache_balancing\.py .*": "takes minutes",
    r"python benchmarks/links/slow_link\.py .*": "needs root, and takes minutes",
    r"python benchmarks/(plans|cluster)/\w+\.py --published .*": "needs published lengths",
}

OF_OLDER_CODE = re.compile(r" --(most-promising|sweep-batches) \d+")
"""Flags that are gone, on pages of results that older code made."""

# Indented blocks without a command, by how they begin.
BLOCKS = {
    "iteration 2/2 | lm loss": "test_step_log.py has the line",
    "steps 2 to 15, per step": "test_the_quick_starts_comparison",
    "load max/mean   2.097": "test_the_figures_of_one_plan",
    "--seq-length was 1024, now 512": "test_the_message_of_another_length",
    "--": "test_flags_in_blocks",
    "from megatron_patches.megatron_lm import": "test_megatron_lm.py",
    "import torch\n    from distca.inference import": "test_llm.py runs it",
    "from distca.library import": "support/library_loops.py makes these calls",
    "log = batch.log_probabilities": "test_documented_losses.py runs it",
    "policy = batch.sum_rollouts": "test_documented_losses.py runs it",
    "pretrain = with_distca(pretrain, documents": "test_megatron_lm.py",
    '{"messages": [': "test_the_lines_of_conversations",
    '{"prompt": "How far': "test_the_lines_of_conversations",
    "tiles, DP4: events on": "test_recording.py",
    "@article{": "no program prints it",
    "benchmarks/   ": "no program prints it",
}


def matching(patterns, text: str) -> list[str]:
    return [pattern for pattern in patterns if re.fullmatch(pattern, text)]


def those_of(patterns) -> list[str]:
    return [text for text in COMMANDS if matching(patterns, text)]


def test_every_command_is_run_or_has_a_reason() -> None:
    patterns = (*RUN, *RUN_IF_FULL, *NOT_RUN)
    assert {
        text: matching(patterns, text) for text in COMMANDS if len(matching(patterns, text)) != 1
    } == {}
    assert [pattern for pattern in patterns if not those_of([pattern])] == []
    assert len(COMMANDS) > 90


def test_every_block_is_compared_or_has_a_reason() -> None:
    found = [block.strip() for page in PAGES for block in read_page(page).blocks]
    begins = {block: [each for each in BLOCKS if block.startswith(each)] for block in found}
    assert [block for block, each in begins.items() if not each] == []
    assert {each for named in begins.values() for each in named} == {*BLOCKS}


@pytest.mark.parametrize("text", COMMANDS)
def test_flags_are_known(text: str) -> None:
    # What is whole on one page may be a part of a command on another.
    command = max(COMMANDS[text], key=lambda command: command.whole)
    check_flags(replace(command, text=OF_OLDER_CODE.sub("", command.text)))


@pytest.mark.parametrize("command", examples_of_help(), ids=lambda command: command.text)
def test_flags_in_examples_are_known(command: Command) -> None:
    check_flags(command)


def test_the_lines_of_conversations() -> None:
    blocks = [block.strip() for page in PAGES for block in read_page(page).blocks]
    for begins, weights in (('{"messages"', [1]), ('{"prompt"', [1, 0.5])):
        (line,) = [block for block in blocks if block.startswith(begins)]
        read = list(_conversations(line.encode()))
        assert [weight for _, weight, _ in read] == weights
        for messages, _, _ in read:
            assert [each["role"] for each in messages] == ["user", "assistant"]


def test_flags_in_blocks() -> None:
    blocks = [block for page in PAGES for block in read_page(page).blocks]
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    flags = [line.split() for line in lines if re.fullmatch(r"(--[\w-]+( [^-\s]\S*)? ?)+", line)]
    assert len(flags) == 9
    for line in flags:
        parse_training_flags(line)


class Typed:
    """Commands typed in a folder that holds what they need; each is run once.

    Args:
        folder: where they are typed. Those that build on each other find each other's files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._printed = folder, dict[str, str]()
        (folder / "texts").mkdir()
        for page in (ROOT / "docs").glob("*.md"):
            shutil.copy(page, folder / "texts")
        (folder / "tests").symlink_to(ROOT / "tests")
        (folder / "lengths.json").write_text(json.dumps([300_000, *[20_000] * 100]))
        self._write_logs()
        event = {"ph": "X", "ts": 0.0, "dur": 9.0, "pid": 0, "tid": 0}
        spans = [("forward: micro-batch 0", "ticks"), ("wait for combine", "exchange")]
        events = [event | {"name": name, "cat": lane} for name, lane in spans]
        write_trace(folder / "trace.json", [("rank 0", events)])

    def _write_logs(self) -> None:
        golden = json.loads((ROOT / "tests" / "golden" / "demo_losses.json").read_text())
        line = "iteration {}/80 | lm loss: {:.6f} | grad norm: 1.0 | s: 0.1 | tokens/s: 9 |\n"
        log = "".join(line.format(n, loss) for n, loss in golden["lm loss"].items())
        (self.folder / "sweep").mkdir()
        for name in ("demo.log", "run.log", "sweep/plain-1.log", "sweep/tiles-1.log"):
            (self.folder / name).write_text(log)

    def printed_by(self, text: str) -> str:
        """What a command prints."""
        if text not in self._printed:
            if "corpus.idx" in text or "tokenizer-model" in text:
                (train,) = those_of([r"distca prepare .*--train-tokenizer \d+"])
                self.printed_by(train)
                for name in ("llama", "Llama-3.1-8B"):
                    source = self.folder / "corpus_tokenizer"
                    shutil.copytree(source, self.folder / name, dirs_exist_ok=True)
            if "--load plan.json" in text:
                (saved,) = those_of([SAVED])
                self.printed_by(saved)
            self._printed[text] = self._run(text)
        return self._printed[text]

    def _run(self, text: str) -> str:
        sizes = {"H": "2", "K": "1", "D": "8", "L": "256"}
        program, *words = [sizes.get(word, word) for word in arguments_of(text)]
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(io.StringIO()) as printed:
            words = [path for word in words for path in sorted(glob.glob(word)) or [word]]
            if program == "distca":
                assert distca_main(words) == 0
            else:
                main, flags = main_of(words)
                with patch.object(sys, "argv", [words[0], *flags]):
                    assert main() in (0, None)
        return printed.getvalue()


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Typed:
    pytest.importorskip("matplotlib")
    return Typed(tmp_path_factory.mktemp("typed"))


def in_form(text: str) -> list[str]:
    """Lines without the milliseconds that planning took: the last column of a table."""
    return [
        re.sub(r"^(\S+ +(?:[\d.]+ +){8})\d+\.\d$", r"\1#", re.sub(r" +(?=\S+$)", " ", line))
        for line in text.rstrip().splitlines()
    ]


@pytest.mark.parametrize("text", those_of(RUN))
def test_commands_print_what_pages_show(text: str, typed: Typed) -> None:
    printed = in_form(typed.printed_by(text))
    for command in COMMANDS[text]:
        shown = in_form("\n".join(command.shown))
        assert shown == (printed if shown else [])
    for name in re.findall(r"--(?:plot|save|output) (\S+\.\w+)", text):
        assert (typed.folder / name).stat().st_size > 0


@pytest.mark.parametrize("text", those_of(RUN_IF_FULL))
def test_dearer_commands_run(text: str, full: bool, typed: Typed) -> None:
    if not full:
        pytest.skip("takes tens of CPU seconds: give --full")
    program, *words = arguments_of(text)
    command = [str(Path(sys.executable).parent / "distca"), *words]
    if program == "python":
        command = [sys.executable, str(ROOT / words[0]), *words[1:]]
    done = subprocess.run(command, cwd=typed.folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout
    if "paper.py" in text:
        compare_with_stored(words[1], typed.folder)


@pytest.mark.parametrize("name", ["appendix", "fig3", "fig4", "fig6"])
def test_simulated_experiments_give_the_stored_results(name: str, typed: Typed) -> None:
    typed.printed_by(PAPER.format(name))
    compare_with_stored(name, typed.folder)


def compare_with_stored(name: str, folder: Path) -> None:
    stored = ROOT / "benchmarks" / "results" / "cluster" / f"{name}.md"
    # Without how a page was made, which tells of code and not of figures.
    made, kept = (
        path.read_text().partition("\n*Made on")[0].partition("\n<!-- made by")[0]
        for path in (folder / "DIR" / f"{name}.md", stored)
    )
    assert made == kept


def test_the_figures_of_one_plan(typed: Typed) -> None:
    """Those that pages name outside of blocks: before the arrow, after it, and below pictures."""
    concepts, planning, helps = (
        (ROOT / "docs" / f"{name}.md").read_text()
        for name in ("concepts", "planning", "when_it_helps")
    )
    figures = {}
    for scheduler in ("packed", "tiles"):
        printed = typed.printed_by(ONE_PLAN.format(scheduler, scheduler))
        (line,) = re.findall(r"^  load max/mean .*$", printed, re.MULTILINE)
        before, after = re.findall(r"\d\.\d{3}(?= ->| \(min)", line)
        figures[scheduler] = (before, after)
        assert re.search(
            rf"\[{scheduler}\b[^\]]*: servers have [\d.]+ to {float(after):.2f} times", concepts
        )
    (first, *_) = re.findall(r"^    (distca plan .*)$", planning, re.MULTILINE)
    (line,) = re.findall(r"^  load max/mean .*$", typed.printed_by(first), re.MULTILINE)
    assert f"    {line}\n" in planning
    for figure in re.findall(r"\d\.\d{3}", line)[:3]:
        assert re.search(rf"{figure} (is|in this plan|for its) ", planning.replace(",", " "))
    before, after = (float(each) for each in figures["tiles"])
    assert f"which has {before:.1f} times an equal share" in helps
    assert f"`tiles` the busiest rank has {after:.1f} times an equal" in helps


def block_of(page: str, begin: str) -> str:
    (found,) = (
        block for block in read_page(ROOT / "docs" / page).blocks if block.strip().startswith(begin)
    )
    return "\n".join(line[4:] for line in found.splitlines())


def without_figures(text: str) -> str:
    return re.sub(r"\d[\d,]*(\.\d+)?", "#", text)


def test_the_quick_starts_comparison() -> None:
    from data.demo_report import Comparison

    shown = block_of("quick_start.md", "steps 2 to 15")
    rows = re.findall(r"^(\S.*?) {2,}([\d.]+) +([\d.]+)$", shown, re.MULTILINE)
    busiest, mean, _, core, pairs = ((float(plain), float(ours)) for _, plain, ours in rows)
    seconds = list(zip(busiest, mean, strict=True))
    printed = Comparison(2, 15, *seconds, *core, pairs).table()
    assert without_figures(shown) == without_figures(printed)
    # Figures are rounded, so that ratios of them are near.
    figures = [[float(x) for x in re.findall(r"\d+\.\d+", text)] for text in (shown, printed)]
    assert figures[0] == pytest.approx(figures[1], rel=0.01)


def test_the_message_of_another_length() -> None:
    (shown,) = block_of("moving_a_job.md", "--seq-length was").splitlines()
    source = (ROOT / "megatron_patches" / "batches" / "resuming.py").read_text()
    logged = re.sub(r'"\s+"', "", source)
    assert re.sub(r"\b\d+\b", "%d", shown) in logged
