"""`distca plan`, and saved plans."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from distca.commands import plan_compare
from distca.commands.plan_plot import busiest_servers, draw_documents, draw_loads
from distca.cost.model_sizes import MODELS
from distca.cost.profile import Profile
from distca.cost.volume import AttentionShape
from distca.documents.lengths import cut_to_pieces, shuffled
from distca.plan import Mask, load_plan, save_plan
from distca.schedule import COMPARED, ScheduleConfig, make_scheduler
from support.batches import placement_rows
from support.commands import Command
from support.random_plans import random_lengths, random_plan

SMALL = "--servers 4 --tokens-per-server 4096 --model llama-8b".split()


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command("plan", capsys)


@pytest.fixture
def lengths_file(tmp_path: Path) -> str:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([9000, 100, 1, *[400] * 15]))
    return str(path)


def test_json_has_the_metrics(command, lengths_file: str) -> None:
    found = json.loads(command.run("--lengths", lengths_file, *SMALL, "--json"))
    assert found["scheduler"] == "tiles"
    assert (found["documents"], found["tokens"]) == (18, 15101)
    assert found["load_max_over_mean_before"] >= found["load_max_over_mean"] >= 1
    assert found["bytes_total"] >= found["bytes_max_sent"] > 0
    assert found["bytes_max_received"] > 0
    assert found["tasks"] >= 18
    assert 4 <= found["kernel_calls"] <= 8
    assert found["plan_seconds"] > 0
    assert found["exchange_seconds"] > 0


def test_a_readable_table(command, lengths_file: str) -> None:
    text = command.run("--lengths", lengths_file, *SMALL, "--scheduler", "greedy")
    assert text.startswith("plan by greedy for 4 servers")
    assert "18 of 15,101 tokens" in text
    assert "planned in" in text


def test_all_schedulers_in_one_table(command, lengths_file: str) -> None:
    text = command.run("--lengths", lengths_file, *SMALL, "--compare")
    assert [line.split()[0] for line in text.splitlines()[1:-2]] == ["plain", *COMPARED]
    rows = json.loads(command.run("--lengths", lengths_file, *SMALL, "--compare", "--json"))
    assert list(rows) == ["plain", *COMPARED]
    # What the report of a plan has before the arrow, and not the plan of whole documents.
    plain, packed = rows["plain"], rows["packed"]
    before = rows["tiles"]["load_max_over_mean_before"]
    assert plain["load_max_over_mean"] == before != packed["load_max_over_mean"]
    assert plain["bytes_total"] == 0 < packed["bytes_total"]
    assert all("bytes_total" in row for row in rows.values())
    # One that cannot be made says why, and the others are still there.
    rows = json.loads(
        command.run(
            *("--lengths", lengths_file, *SMALL, "--compare", "--json"),
            *("--context-parallel-size", "3"),
        )
    )
    assert "does not divide 4 ranks" in rows["ring-zigzag"]["error"]
    assert "bytes_total" in rows["tiles"]


@pytest.mark.parametrize(
    ("window", "mask"),
    [(["--window-left", "100"], Mask(100)), (["--attention-chunk-size", "256"], Mask(None, 256))],
)
def test_layers_with_windows_have_the_placement_of_those_without(
    command, lengths_file: str, tmp_path: Path, window: list[str], mask: Mask
) -> None:
    """The plan that is shown is that of layers without; the others' figures follow it."""
    made = []
    for number, flags in enumerate(([], window, [*window, "--window-attn-skip-freq", "6"])):
        path = tmp_path / f"{number}.json"
        command.run("--lengths", lengths_file, *SMALL, *flags, "--save", str(path))
        made.append(load_plan(path)[0])
    whole, alone, beside = ((placement_rows(plan), plan.mask) for plan in made)
    assert beside == whole == (whole[0], Mask())
    assert alone == (alone[0], mask)
    assert alone[0] != whole[0]
    given = ["--lengths", lengths_file, *SMALL, *window, "--window-attn-skip-freq", "6", "--json"]
    (others,) = json.loads(command.run(*given))["other_layers"]
    lengths, servers = made[0].lengths, made[0].world_size
    zeros = np.zeros_like(lengths)
    pairs = float(mask.pairs(zeros, lengths, zeros, lengths).sum())
    assert others["load_mean"] * servers == pytest.approx(pairs, rel=0.01)
    assert others["documents_spanning"] == json.loads(command.run(*given))["documents_spanning"]


def test_save_load_and_plot(command, lengths_file: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan_file, picture = tmp_path / "new" / "plan.json", tmp_path / "plan.png"
    made = command.run(
        *("--lengths", lengths_file, *SMALL, "--save", str(plan_file), "--plot", str(picture)),
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    saved = json.loads(plan_file.read_text())
    assert saved["documents"][:3] == [9000, 100, 1]
    assert [sum(end - start for _, start, end in rank) for rank in saved["placement"]] == [
        3776,
        3775,
        3775,
        3775,
    ]
    assert saved["configuration"]["servers"] == 4
    assert saved["configuration"]["shape"]["heads"] == 32
    covered = sum(
        Mask().pairs(q_start, q_end, kv_start, kv_end)
        for _, q_start, q_end, kv_start, kv_end, _ in saved["tasks"]
    )
    assert covered == sum(n * (n + 1) // 2 for n in saved["documents"])
    loaded = command.run("--load", str(plan_file))
    assert loaded.splitlines() == made.splitlines()[:-1]
    svg = tmp_path / "again.svg"
    command.run("--load", str(plan_file), "--plot", str(svg))
    assert "<svg" in svg.read_text()
    saved["tasks"].pop()
    plan_file.write_text(json.dumps(saved))
    assert "visible pairs are not all covered" in command.refused("--load", str(plan_file))


def test_the_plot_marks_the_load_that_the_tolerance_allows() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.add_subplot()
    config = ScheduleConfig(shape=MODELS["llama-8b"].attention_shape(), tolerance=0.25)
    plan = make_scheduler("tiles", config).plan(np.array([700, 324]), np.array([512, 512]), Mask())
    relative = draw_loads(axes, plan, config, [])
    assert axes.lines[0].get_ydata() == [1.25, 1.25]
    assert [bar.get_height() for bar in axes.patches] == relative.tolist()
    assert axes.get_xticks().tolist() == [0, 1]
    assert axes.texts[0].get_text() == "mean + 25% (tolerance)"


def test_the_plot_highlights_the_busiest_and_labels_large_tasks() -> None:
    axes = pytest.importorskip("matplotlib.figure").Figure().add_subplot()
    config = ScheduleConfig(shape=MODELS["llama-8b"].attention_shape())
    lengths = np.array([100] * 5 + [60, 40] + [30, 30, 40] + [20] * 5)
    plan = make_scheduler("packed", config).plan(lengths, np.full(8, 100), Mask())
    highlighted = busiest_servers(plan)
    assert highlighted == [0, 1, 2, 3]
    draw_documents(axes, plan, highlighted)
    labels = {text.get_text(): text.get_color() for text in axes.texts}
    # Short documents have no room for a number.
    assert set(labels) == {"0", "1", "2", "3", "4", "5", "6"}
    (colours,) = (each.get_facecolor() for each in axes.collections)
    grey = plan.tasks.server > 3
    assert len(np.unique(colours[grey], axis=0)) == 1
    assert len(np.unique(colours[~grey], axis=0)) == 4
    # All have colours where there are enough.
    few = make_scheduler("packed", config).plan(np.array([200, 100]), np.full(3, 100), Mask())
    assert busiest_servers(few) == [0, 1, 2]


def test_a_row_of_the_comparison_has_the_figures_of_the_json(command, lengths_file) -> None:
    """Gigabytes and times in units and digits of their own; packed moves nothing."""
    given = ["--lengths", lengths_file, *SMALL, "--compare"]
    text, rows = command.run(*given), json.loads(command.run(*given, "--json"))
    found = rows["tiles"]
    cells = [
        f"{found['load_max_over_mean']:.3f}",
        f"{found['bytes_total'] / 1e9:.3f}",
        f"{found['bytes_max_sent'] / 1e9:.3f}",
        f"{found['bytes_max_received'] / 1e9:.3f}",
        f"{1e3 * found['link_seconds_max']:.2f}",
        str(found["tasks"]),
        str(found["kernel_calls"]),
        f"{found['tokens_max_over_mean']:.3f}",
    ]
    (line,) = (line for line in text.splitlines() if line.startswith("tiles "))
    # The last column is a time, which no two runs share.
    assert line.split()[1:-1] == cells


def test_milliseconds_of_planning(command, lengths_file, monkeypatch) -> None:
    """A clock that goes on by 1/64 s, 3/64 s, 5/64 s, ...: the first plan takes 15.625 ms."""
    for flags, said in (
        ([], "planned in      15.6 ms, one rank's exchange in 46.9 ms"),
        (["--compare"], " 15.6\n"),
    ):
        clock = (n * n / 64 for n in itertools.count())
        monkeypatch.setattr(plan_compare, "time", SimpleNamespace(perf_counter=clock.__next__))
        assert said in command.run("--lengths", lengths_file, *SMALL, *flags)


@pytest.mark.parametrize("mask", [Mask(), Mask(40), Mask(None, 64)])
def test_saved_plans_are_the_same_plans(tmp_path: Path, mask: Mask) -> None:
    rng = np.random.default_rng(5)
    lengths = random_lengths(rng, 4 * 300)
    plan = random_plan(rng, lengths, 4, 300, mask)
    save_plan(plan, tmp_path / "p.json", {"made": "for a test"})
    again, configuration = load_plan(tmp_path / "p.json")
    assert configuration["made"] == "for a test"
    assert again.mask == plan.mask
    assert again.block == plan.block
    for rank in range(4):
        ours, theirs = plan.placement.of_rank(rank), again.placement.of_rank(rank)
        assert np.array_equal(ours.document, theirs.document)
        assert np.array_equal(ours.start, theirs.start)
    for name in ("document", "q_start", "q_end", "kv_start", "kv_end", "server"):
        assert np.array_equal(getattr(plan.tasks, name), getattr(again.tasks, name))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1}'])
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ValueError, match="no usable plan"):
        load_plan(tmp_path / "p.json")
    with pytest.raises(ValueError, match="does not exist: make a plan"):
        load_plan(tmp_path / "none.json")


def test_distributions_and_pieces(command) -> None:
    arguments = ["--distribution", "pretrain", *SMALL, "--json"]
    found = [json.loads(command.run(*arguments, "--seed", seed)) for seed in "001"]
    assert found[0]["tokens"] == 16384
    assert found[0]["bytes_total"] == found[1]["bytes_total"]
    assert found[0]["documents"] != found[2]["documents"]
    pieces = json.loads(command.run(*arguments, "--max-document-length", "1000"))
    assert pieces["documents"] >= 17
    assert cut_to_pieces(np.array([5, 10, 11]), 5).tolist() == [5, 5, 5, 5, 5, 1]


def test_options_reach_the_plan(command, tmp_path: Path) -> None:
    arguments = ["--distribution", "lognormal", *SMALL, "--json"]
    base = json.loads(command.run(*arguments))
    for options, key in (
        (["--tensor-model-parallel-size", "8"], "bytes_total"),
        (["--window-left", "100"], "load_mean"),
        (["--placement", "sequential"], "bytes_total"),
        (["--tolerance", "0.01"], "bytes_total"),
        (["--server-speeds", "1,1,1,0.25"], "load_max_over_mean_before"),
        (["--servers-per-node", "4"], "bytes_between_nodes"),
        (["--network-gb-per-s", "10"], "link_seconds_max"),
    ):
        found = json.loads(command.run(*arguments, *options))
        assert found[key] != base[key], options
    seconds = ((1e-6, 2e-6), (3e-6, 9e-5))
    profile = Profile((128, 4096), seconds, seconds, AttentionShape(32, 8, 128), {})
    profile.save(tmp_path / "profile.json")
    timed = json.loads(command.run(*arguments, "--profile", str(tmp_path / "profile.json")))
    assert timed["load_unit"] == "seconds (predicted)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--distribution webtext --model llama-8b", "no distribution 'webtext'"),
        ("--distribution fixed --model llama-9b", "no model 'llama-9b'"),
        ("--distribution fixed --model llama-8b --scheduler best", "no scheduler 'best'"),
        ("--distribution fixed", "give --model or --heads"),
        ("--distribution fixed --model llama-8b --heads 3", "not a multiple of 8 key-value"),
        ("--distribution fixed --heads 3 --kv-heads 2", "not a multiple"),
        ("--distribution fixed --model llama-8b --tolerance 1.5", "tolerance 1.5"),
        ("--distribution fixed --model llama-8b --servers 0", "give --servers"),
        ("--distribution fixed --model llama-8b --server-speeds 1,x", "--server-speeds 1,x"),
        ("--distribution fixed --model llama-8b --server-speeds 1,2", "2 server speeds"),
        (
            "--distribution fixed --model llama-8b --profile none.json",
            "none.json does not exist: make",
        ),
        ("--distribution fixed --model llama-8b --max-document-length 0", "at least 1"),
        ("--distribution fixed --model llama-8b --compare --save x", "--compare"),
        (
            "--distribution fixed --model llama-8b --max-buffer-bytes 1 --scheduler greedy",
            "--max-buffer-bytes is for tiles, not for the scheduler greedy",
        ),
        ("--distribution fixed --model llama-8b --tensor-model-parallel-size 3", "divide"),
        ("--lengths none.json --model llama-8b", "does not exist"),
        ("--distribution fixed --model llama-8b --seed -1", "--seed -1 must not be negative"),
        ("--distribution fixed --model llama-8b --window-left -1", "--window-left -1 must not"),
        ("--distribution fixed --model llama-8b --window-attn-skip-freq 6", "add --window-left"),
        ("--distribution fixed --model llama-8b --attention-chunk-size 100", "a multiple of 128"),
        (
            "--distribution fixed --model llama-8b --attention-chunk-size 128 --window-left 9",
            "give one of --window-left and --attention-chunk-size",
        ),
        ("--distribution fixed --model llama-8b --save .", "--save . is a folder"),
        ("--distribution fixed --model llama-8b --plot .", "--plot . is a folder"),
        ("--distribution fixed --model llama-8b --heads 0", "--heads 0 must be at least 1"),
        ("--distribution fixed --heads 4 --kv-heads -1", "--kv-heads -1 must be at least 1"),
        ("--distribution fixed --heads 8 --kv-heads 0", "--kv-heads 0 must be at least 1"),
        ("--distribution fixed --model llama-8b --head-dim 0", "--head-dim 0 must be at least 1"),
        ("--distribution fixed --model llama-8b --v-head-dim -1", "--v-head-dim -1 must be"),
        ("--distribution fixed --model llama-8b --dtype-bytes 0", "--dtype-bytes: invalid choice"),
        ("--distribution fixed --model Qwen/Qwen3-8B", "(is qwen3-8b meant?): choose from"),
        # The nearest size of that name, or the name that begins so.
        ("--distribution fixed --model llama-7b", "(is llama-8b meant?): choose from"),
        ("--distribution fixed --model qwen3-30b", "(is qwen3-30b-a3b meant?): choose from"),
        ("--distribution fixed --model tests", "--model tests has no config.json"),
        ("--distribution pretran --model llama-8b", "(is pretrain meant?)"),
        ("--distribution fixed --model llama-8b --plot x.json", "--plot x.json: the suffix must"),
        ("--distribution fixed --model llama-8b --plot /dev/null", "the suffix must be one of"),
        (
            "--distribution fixed --model llama-8b --context-parallel-size 2",
            "--context-parallel-size is for per-document-cp, ring-zigzag, hybrid-cp, dynamic-cp, "
            "wlb-llm, not",
        ),
        (
            "--distribution fixed --model llama-8b --scheduler packed --tolerance 0.2",
            "--tolerance is for greedy, tiles, not for the scheduler packed",
        ),
        (
            "--distribution fixed --model llama-8b --compare --scheduler tiles",
            "leave --scheduler out",
        ),
    ],
)
def test_bad_input_is_refused(command, arguments: str, message: str) -> None:
    defaults = "--servers 4 --tokens-per-server 4096"
    assert message in command.refused(*defaults.split(), *arguments.split())


def test_a_seed_beside_a_list_of_lengths_is_refused(command, lengths_file: str) -> None:
    refused = command.refused("--lengths", lengths_file, *SMALL, "--seed", "1")
    assert "the list of --lengths is taken as it is" in refused


MAKING = {
    "--seed": "3",
    "--max-document-length": "1000",
    "--servers": "8",
    "--tokens-per-server": "4096",
    "--scheduler": "nonsense",
    "--tolerance": "nan",
    "--placement": "sequential",
    "--max-buffer-bytes": "-1",
    "--context-parallel-size": "2",
    "--window-left": "-5",
    "--attention-chunk-size": "100",
    "--window-attn-skip-freq": "2",
    "--compare": None,
}
"""Flags that make a plan, and values that were ignored with --load."""


def test_with_load_each_flag_is_used_or_refused(command, lengths_file: str, tmp_path: Path) -> None:
    path, again, profile = (str(tmp_path / name) for name in ("p.json", "2.json", "t.json"))
    command.run("--lengths", lengths_file, *SMALL, "--save", path)
    shown = json.loads(command.run("--load", path, "--json"))
    for flag, value in MAKING.items():
        given = [flag] if value is None else [flag, value]
        assert f"{flag} is for making a plan" in command.refused("--load", path, *given)

    seconds = ((1e-6, 2e-6), (3e-6, 9e-5))
    Profile((128, 4096), seconds, seconds, AttentionShape(32, 8, 128), {}).save(Path(profile))
    for given, key in (
        (["--network-gb-per-s", "1"], "link_seconds_max"),
        (["--servers-per-node", "4"], "bytes_between_nodes"),
        (["--server-speeds", "1,1,1,0.25"], "load_max_over_mean"),
        (["--profile", profile], "load_unit"),
        (["--heads", "8"], "bytes_total"),
        (["--model", "llama-8b", "--kv-heads", "4"], "bytes_total"),
        (["--model", "llama-8b", "--dtype-bytes", "4"], "bytes_total"),
        (["--model", "llama-8b", "--tensor-model-parallel-size", "2"], "bytes_total"),
    ):
        found = json.loads(command.run("--load", path, "--json", *given, "--save", again))
        assert found[key] != shown[key], given
        if "--profile" not in given:
            assert json.loads(command.run("--load", again, "--json")) == found
    kept = [json.loads(Path(each).read_text())["configuration"] for each in (path, again)]
    assert kept[0]["servers"] == kept[1]["servers"] == 4
    for given, message in (
        (["--network-gb-per-s", "-1"], "must be positive"),
        (["--node-gb-per-s", "0"], "must be positive"),
        (["--server-speeds", "x"], "--server-speeds x"),
        (["--profile", "none.json"], "none.json does not exist"),
        (["--dtype-bytes", "4"], "--dtype-bytes with --load: add --model or --heads"),
        (
            ["--model", "llama-8b", "--profile", profile, "--dtype-bytes", "4"],
            "--dtype-bytes 2, not",
        ),
    ):
        assert message in command.refused("--load", path, *given)


def test_a_prefill_in_steps_is_not_judged_by_links(command, tmp_path: Path) -> None:
    path = str(tmp_path / "p.json")
    sizes = "--new-tokens 500 --context-parallel-size 2 --model llama-8b".split()
    command.run("prefill", *sizes, "--save", path)
    command.run("--load", path)
    refused = command.refused("--load", path, "--network-gb-per-s", "1")
    assert "not judged by --network-gb-per-s" in refused


def test_flags_win_over_a_model_and_its_windows_are_planned(command) -> None:
    given = ["--distribution", "pretrain", *SMALL[:4], "--json"]
    whole = json.loads(command.run(*given, "--model", "llama-8b"))
    few = json.loads(command.run(*given, "--model", "llama-8b", "--kv-heads", "2"))
    assert few["bytes_total"] < whole["bytes_total"]
    gemma = json.loads(command.run(*given, "--model", "gemma3-27b-like"))
    same = "--heads 32 --kv-heads 16 --window-left 1023 --window-attn-skip-freq 6".split()
    described = json.loads(command.run(*given, *same))
    assert (gemma["load_mean"], gemma["bytes_total"]) == (
        described["load_mean"],
        described["bytes_total"],
    )
    assert gemma["load_mean"] == json.loads(command.run(*given, *same[:4]))["load_mean"]
    (others,) = gemma["other_layers"]
    assert others["load_mean"] < gemma["load_mean"]
    text = command.run(*given[:-1], "--model", "gemma3-27b-like")
    seen = "every 6th layer, which sees all; a query of the others sees a window of 1,023"
    assert seen in text
    balance = f"{others['load_max_over_mean_before']:.3f} -> {others['load_max_over_mean']:.3f}"
    assert f"  other layers    load max/mean {balance} (mean" in text
    scout = command.run(*given[:-1], "--model", "llama4-scout-like")
    assert "every 4th layer, which sees all; a query of the others sees a chunk of 8,192" in scout
    compared = command.run(*given[:-1], "--model", "gemma3-27b-like", "--compare")
    assert f"All rows are of {seen}" in compared
    assert "  layers  " not in command.run(*given[:-1], "--model", "llama-8b")


def test_a_saved_plan_is_of_layers_that_the_model_has(command, tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    given = ["--distribution", "pretrain", *SMALL[:4]]
    command.run(*given, "--model", "llama-8b", "--save", plan)
    assert "  layers  " not in command.run("--load", plan, "--model", "llama-70b")
    # Every sixth layer of Gemma 3 has this plan, and no layer with windows alone.
    shown = command.run("--load", plan, "--model", "gemma3-27b-like")
    assert "every 6th layer, which sees all; a query of the others sees a window of 1,023" in shown
    shown = command.run(*given, "--model", "gpt-oss-120b-like", "--save", plan)
    assert "every 2nd layer, which sees all" in shown
    command.run(*given, "--heads", "64", "--kv-heads", "8", "--window-left", "127", "--save", plan)
    shown = command.run("--load", plan, "--model", "gpt-oss-120b-like")
    assert "those of a window of 127 earlier tokens; every 2nd layer sees all" in shown
    refused = command.refused("--load", plan, "--model", "llama-8b")
    assert "that see a window of 127 earlier tokens, but those of --model llama-8b see" in refused


def test_latents_are_described_by_flags_as_by_a_preset(command) -> None:
    given = ["--distribution", "pretrain", *SMALL[:4], "--json", "--latent-rows", "on"]
    preset = json.loads(command.run(*given, "--model", "deepseek-v3-like"))
    flags = (
        "--heads 128 --head-dim 192 --kv-lora-rank 512 --qk-pos-emb-head-dim 64 --v-head-dim 128"
    )
    assert json.loads(command.run(*given, *flags.split()))["bytes_total"] == preset["bytes_total"]
    assert "needs a model with latents" in command.refused(*given, "--heads", "128")
    few = flags.replace("--qk-pos-emb-head-dim 64 ", "").split()
    assert "latent attention needs --qk-pos-emb-head-dim" in command.refused(*given, *few)


def test_too_many_tokens_are_refused(command, lengths_file: str) -> None:
    few = "--servers 2 --tokens-per-server 4096 --model llama-8b".split()
    assert "15,101 tokens" in command.refused("--lengths", lengths_file, *few)


def test_a_batch_is_drawn_of_an_index(command, tmp_path: Path) -> None:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    prefix = str(tmp_path / "corpus")
    builder = indexed.IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
    for length in range(1, 401):
        builder.add_document(torch.zeros(length, dtype=torch.int64), [length])
    builder.finalize(prefix + ".idx")
    drawn = [
        json.loads(command.run("--lengths", prefix + ".idx", *SMALL, "--json", "--seed", seed))
        for seed in "112"
    ]
    # The corpus has 80,200 tokens.
    assert [found["tokens"] for found in drawn] == [4 * 4096] * 3
    pairs = [found["load_mean"] for found in drawn]
    assert pairs[0] == pairs[1] != pairs[2]
    # A batch of more tokens has documents again, as training in further epochs has.
    roomy = "--servers 4 --tokens-per-server 65536 --model llama-8b --json".split()
    several = json.loads(command.run("--lengths", prefix + ".idx", *roomy))
    assert several["tokens"] == 4 * 65536
    assert several["documents"] > 400 * 3
    twice = shuffled(np.array([3, 5]), 13, seed=0)
    assert sorted(twice[:2].tolist()) == [3, 5]
    assert twice.sum() == 13


def test_as_a_module_with_its_exit_status() -> None:
    command = [sys.executable, "-m", "distca", "plan", "--distribution", "none", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("distca plan: no distribution 'none'")
