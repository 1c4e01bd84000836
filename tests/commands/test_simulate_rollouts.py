"""`distca simulate rollouts`."""

from __future__ import annotations

import json

import pytest

from distca.commands import simulate_rollouts
from distca.commands.main import main

SIZES = "--prompt 8192 --responses 8 --response 1024 --groups 8 --gpus 8 --cluster dgx-h200"
FLAGS = [*SIZES.split(), "--model", "llama-3.2-1b", "--systems", "plain", "cp-p2p"]
FLAGS += ["--tensor-model-parallel-sizes", "1", "--batches", "2"]


def test_it_says_what_sharing_gains(capsys) -> None:
    assert main(["simulate", "rollouts", *FLAGS]) == 0
    first, *table = capsys.readouterr().out.splitlines()
    assert first.startswith("Share prompts: ")
    assert "times as fast as rollouts one by one with the fastest, " in first
    assert "times as fast as " in first.partition(";")[2]
    assert any(line.startswith("trees over all ranks (DistCA)") for line in table)
    assert main(["simulate", "rollouts", *FLAGS, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    one_by_one, as_trees = (rows[0][f"tokens_{way}"] for way in ("one_by_one", "as_trees"))
    assert f" {sum(one_by_one) / 2:,.0f} tokens one by one, {sum(as_trees) / 2:,.0f} as" in table[0]
    for row in rows:
        assert f"{row['tokens_per_second']:,.0f} " in "\n".join(table)
        assert row["tokens_per_second"] * sum(row["seconds"]) == pytest.approx(sum(one_by_one))
        over = row["first_row_over_it"]["mean"]
        assert over == pytest.approx(sum(row["seconds"]) / sum(rows[0]["seconds"]))
    # Parts of an iteration add up to it.
    for row in rows[:2]:
        assert sum(row["parts"].values()) == pytest.approx(row["seconds"][0], rel=1e-6)
        assert row["parts"]["linear"] + row["parts"]["attention"] < row["seconds"][0]
    assert sum("% core attention, " in line for line in table) == 2
    seconds = {row["title"]: sum(row["seconds"]) for row in rows}
    apart = min(each for title, each in seconds.items() if title.startswith("one by one"))
    trees = (each for title, each in seconds.items() if not title.startswith("one by one"))
    gain = apart / min(trees)
    assert f"Share prompts: {gain:.3f} (" in first
    assert gain > 2


def test_measured_lengths_give_what_the_same_numbers_give(capsys, tmp_path) -> None:
    """A file of equal groups is the job that numbers without a spread describe."""
    file = tmp_path / "groups.jsonl"
    group = {"prompt": 8192, "responses": [1024] * 8}
    file.write_text(f"{json.dumps(group)}\n" * 8)
    job = "--gpus 8 --cluster dgx-h200 --model llama-3.2-1b --systems plain --json"
    job += " --tensor-model-parallel-sizes 1"
    said = []
    numbers = "--prompt 8192 --responses 8 --response 1024 --groups 8 --spread 0 --batches 1"
    for flags in (numbers.split(), ["--lengths", str(file)]):
        assert main(["simulate", "rollouts", *job.split(), *flags]) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0] == said[1]
    # Batches that are drawn have other groups, and prompts differing numbers of responses.
    file.write_text(
        "".join(json.dumps({"prompt": 8192, "responses": [1024] * n}) + "\n" for n in range(1, 9))
    )
    flags = [*job.split(), "--lengths", str(file), "--groups", "4", "--batches", "2"]
    assert main(["simulate", "rollouts", *flags]) == 0
    first = json.loads(capsys.readouterr().out)[0]
    assert sum(first["tokens_one_by_one"]) == sum(n * 9216 for n in range(1, 9))
    flags.remove("--json")
    assert main(["simulate", "rollouts", *flags]) == 0
    assert ", 4 prompts with 1 to 8 responses each, " in capsys.readouterr().out


def test_flags_that_contradict_a_file_or_are_missing(capsys, tmp_path) -> None:
    job = "--gpus 8 --cluster dgx-h200 --model llama-3.2-1b".split()
    for flags, message in (
        (["--prompt", "9"], "give --responses, --response, --groups, or --lengths FILE"),
        (["--lengths", "x", "--prompt", "9", "--spread", "0"], "leave out --prompt, --spread"),
        (["--lengths", str(tmp_path / "none")], "none does not exist"),
        (["--lengths", ""], "argument --lengths: the name is empty: give the name of a file"),
        (["--lengths", "x", "--groups", "0"], "--groups 0: give at least 1"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["simulate", "rollouts", *job, *flags])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


def test_short_prompts_are_not_shared(capsys) -> None:
    flags = [*FLAGS, "--prompt", "127", "--spread", "0", "--batches", "1", "--systems", "plain"]
    assert main(["simulate", "rollouts", *flags]) == 0
    first, sizes, *_ = capsys.readouterr().out.splitlines()
    few = "Nothing is shared: prompts with several responses have fewer than 128 tokens (--least). "
    assert first.startswith(few)
    assert "73,664 tokens one by one, 73,664 as trees" in sizes
    assert main(["simulate", "rollouts", *flags, "--least", "127"]) == 0
    first, sizes, *_ = capsys.readouterr().out.splitlines()
    assert "hare prompts: " in first
    assert "73,664 tokens one by one, 66,552 as trees" in sizes
    assert main(["simulate", "rollouts", *flags, "--responses", "1", "--least", "1"]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("Nothing is shared: no prompt has several responses. The rows differ ")


def test_what_does_not_fit_says_why(capsys) -> None:
    """Sizes and systems that are given twice count once."""
    flags = [*FLAGS, "--memory-gb", "30", "--batches", "1", "--gpus", "8"]
    flags += [
        "--systems",
        "cp-a2a+p2p",
        "plain",
        "plain",
        "--tensor-model-parallel-sizes",
        "8",
        "8",
    ]
    assert main(["simulate", "rollouts", *flags]) == 0
    table = capsys.readouterr().out.splitlines()
    for title, reason in (
        ("one by one: context parallel, a2a+p2p", "no valid layout divides"),
        ("each tree on some ranks", "no layout divides the job"),
    ):
        assert f"{title:48}{reason}" in table
    assert sum(line.startswith("one by one: plain Megatron") for line in table) == 1
    assert main(["simulate", "rollouts", *flags, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["seconds"] is None for row in rows] == [False, False, True, True]
    assert rows[3]["why_not"] == "no valid layout divides"
    # Memory that nothing fits in.
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "rollouts", *flags, "--memory-gb", "5", "--json"])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "neither trees nor rollouts one by one (cp-a2a+p2p, plain): use more GPUs" in said.err


def test_a_tiny_job_pays_launches_in_all_systems(capsys) -> None:
    """Sequences are mostly filler there, and launches do not become fewer with tokens."""
    sizes = "--prompt 1 --responses 1 --response 1 --groups 1 --spread 0 --batches 1 --gpus 7"
    systems = "--systems plain cp-p2p cp-a2a"
    assert main(["simulate", "rollouts", *FLAGS, *sizes.split(), *systems.split()]) == 0
    out = capsys.readouterr().out
    assert ", 1 prompt with 1 response each, 2 tokens one by one" in out
    assert "-0.0%" not in out
    assert out.count("one by one: plain Megatron") == 1
    assert main(["simulate", "rollouts", *FLAGS, *sizes.split(), "--json"]) == 0
    trees, plain = json.loads(capsys.readouterr().out)[:2]
    launches = trees["parts"]["launches"]
    assert plain["seconds"][0] > launches > 0.1 * trees["seconds"][0]


def test_long_simulations_are_announced(capsys, monkeypatch) -> None:
    monkeypatch.setattr(simulate_rollouts, "compare", lambda *_: ([], {}))
    for groups, announced in (("250", False), ("251", True)):
        with pytest.raises(SystemExit):
            main(["simulate", "rollouts", *FLAGS, "--groups", groups])
        assert ("2,008 rollouts in a batch take many" in capsys.readouterr().err) == announced


def test_sizes_that_are_given_twice_count_once_elsewhere(capsys) -> None:
    job = "--context 8192 --sequences 4 --model llama-3.2-1b --cluster dgx-h200 --gpus 8 --json"
    flags = ["simulate", *job.split(), "--distribution", "pretrain", "--batches", "2"]
    said = []
    for times in (1, 2):
        search = [["--systems", "plain", "tiles"], ["--tensor-model-parallel-sizes", "8"]]
        search += [["--pipeline-model-parallel-sizes", "1"]]
        given = [word for name, *values in search for word in (name, *values * times)]
        assert main([*flags, *given]) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--responses", "0"], "--responses 0: give at least 1"),
        (["--spread", "-1"], "spread -1.0: give 0 to 3"),
        (["--model", "qwen3-30b-a3b"], "experts are not simulated"),
        (["--model", "gemma3-27b-like"], "windows or chunks"),
        (["--tensor-model-parallel-sizes", "3"], "no size of --tensor-model-parallel-sizes"),
        (["--batches", "0"], "--batches 0: give at least 1"),
        (["--gpus", "100"], "--gpus 100 are not whole nodes of 8: give a multiple"),
        (["--gpus", "1000000000"], "--gpus 1000000000: give at most 65536"),
        (["--prompt", "1000000000000"], "rollouts have more than 134,217,728 tokens"),
        (
            ["--groups", "1000000000"],
            "16,000,000,000 rollouts in all batches: give at most 1,048,576",
        ),
        (["--batches", "1000000000"], "64,000,000,000 rollouts in all batches: give at most"),
        (["--least", "0"], "--least 0: give at least 1"),
        (["--seed", "-1"], "--seed -1 must not be negative"),
        (["--tensor-model-parallel-sizes", "0"], "every size must be at least 1"),
    ],
)
def test_mistakes_are_refused(capsys, flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "rollouts", *FLAGS, *flags])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
