"""The commands around training: the console script, the profiler, comparing losses."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cluster.validate_simulator import (
    PLAIN,
    Prediction,
    is_misplaced,
    pairs_apart,
    predictions_of,
    ranking,
    without_folders,
)
from benchmarks.training import compare_losses
from benchmarks.training.setting import Setting
from benchmarks.training.summary import TimedPass, fit, replay, ticks_seconds
from distca.commands import profile as profiling
from distca.commands.main import COMMANDS, main
from distca.cost.model_sizes import ModelSize
from distca.cost.profile import BothPasses, Profile
from distca.cost.volume import AttentionShape
from distca.simulate import CLUSTERS

LINE = "iteration {:d}/10 | lm loss: {:.6f} | grad norm: 1.0 | s: 0.1 | tokens/s: 9 |"


def test_importing_distca_needs_nothing_else() -> None:
    """Not numpy, not Megatron; a blocked import would raise."""
    code = """
import sys
for name in ("numpy", "megatron", "tqdm", "triton", "flash_attn", "transformer_engine"):
    sys.modules[name] = None
import distca
assert distca.__version__
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_console_script(capsys) -> None:
    assert main([]) == 2
    assert main(["nonsense"]) == 2
    assert "no command 'nonsense'" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "profile" in capsys.readouterr().out


def test_folders_of_this_machine_get_names_in_commands() -> None:
    """Of two that begin alike, or lie in each other, too; nowhere in the middle of a word."""
    folders = {Path("/a/out"): "DIR", Path("/a/out/of"): "STEPS", Path("in"): "PROFILE"}
    typed = "x --throughput /a/out/of/t.json --of /a/out2 --as my-in --profile in/p --output=/a/out"
    assert without_folders(typed, folders) == (
        "x --throughput STEPS/t.json --of /a/out2 --as my-in --profile PROFILE/p --output=DIR"
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_sentences_with_defaults_and_examples(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that no line is broken.
    monkeypatch.setenv("COLUMNS", "9999")
    parser = importlib.import_module(f"distca.commands.{name}").build_parser()
    text = " ".join(parser.format_help().split())
    assert "example" in text
    assert "Default: ." not in text
    assert f"distca {name} " in parser.epilog
    for action in parser._actions:
        if "--help" in action.option_strings:
            continue
        assert (action.help or "").endswith("."), action.dest
        given = action.default not in (None, False, [])
        if given and not action.required and action.nargs != "*":
            shown = text.split(" ".join(action.help.split()))[-1].strip()
            assert shown.startswith("Default: ") or "Default: " in action.help, action.dest


def test_files_that_cannot_be_written_are_refused_before_the_work(tmp_path, capsys) -> None:
    (tmp_path / "text").write_text("1 2 3")
    for arguments, message in (
        (f"profile --output {tmp_path}", "is a folder: give the name of a file"),
        ("profile --output p.json --threads 0", "--threads 0 must be at least 1"),
        (
            f"prepare --input {tmp_path} --tokenizer-type ByteLevelTokenizer --output-prefix "
            f"{tmp_path}/text/corpus",
            "text",
        ),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(arguments.split())
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


def grid(rate: float = 1e6) -> Profile:
    """A kernel that needs exactly `pairs / rate` seconds."""
    lengths = (64, 128, 256, 512)
    full = tuple(tuple(q * kv / rate for kv in lengths) for q in lengths)
    diagonal = tuple(
        tuple((q * max(q, kv) - q * (q - 1) / 2) / rate for kv in lengths) for q in lengths
    )
    return Profile(lengths, full, diagonal, AttentionShape(4, 2, 16, 4), {"hardware": "none"})


def predict(model: Profile, q: int, kv: int, pairs: int) -> float:
    return float(model.seconds(*(np.array([x]) for x in (q, kv, pairs)))[0])


def test_predictions_from_a_known_grid() -> None:
    model = grid()
    # On the grid, between its points, and beyond it, where the peak rate holds.
    assert predict(model, 128, 256, 128 * 256) == pytest.approx(128 * 256 / 1e6)
    assert predict(model, 100, 300, 100 * 300) == pytest.approx(100 * 300 / 1e6)
    assert predict(model, 4096, 8192, 4096 * 8192) == pytest.approx(4096 * 8192 / 1e6)
    on_diagonal = 200 * 400 - 200 * 199 // 2
    assert predict(model, 200, 400, on_diagonal) == pytest.approx(on_diagonal / 1e6, rel=0.02)
    # A window costs its share.
    assert predict(model, 200, 400, on_diagonal // 2) == pytest.approx(on_diagonal / 2e6, rel=0.02)
    assert predict(model, 0, 0, 0) == 0.0
    # Below the grid a task costs what the smallest does.
    assert predict(model, 1, 1, 1) == pytest.approx(64 * 64 / 1e6)


def test_short_queries_stay_slow_beyond_the_grid() -> None:
    """A kernel whose rate falls with its queries: keys that were not measured change nothing."""
    lengths = (64, 128, 256, 512)
    rates = {64: 1e5, 128: 2e5, 256: 5e5, 512: 1e6}
    full = tuple(tuple(q * kv / rates[q] for kv in lengths) for q in lengths)
    diagonal = tuple(
        tuple((q * max(q, kv) - q * (q - 1) / 2) / rates[q] for kv in lengths) for q in lengths
    )
    model = Profile(lengths, full, diagonal, AttentionShape(4, 2, 16, 4), {"hardware": "none"})
    for causal in (False, True):

        def seconds(q: int, kv: int, causal: bool = causal) -> float:
            return predict(model, q, kv, q * kv - q * (q - 1) // 2 * causal)

        # No jump at the edge of the grid, in either length.
        assert seconds(64, 513) == pytest.approx(seconds(64, 512), rel=0.01)
        assert seconds(512, 513) == pytest.approx(seconds(512, 512), rel=0.01)
        assert seconds(513, 513) == pytest.approx(seconds(512, 512), rel=0.01)
        # More keys take longer; many queries run at the rate of the most that were measured.
        assert seconds(64, 8192) > seconds(64, 512) > seconds(64, 256)
        pairs = 2048 * 8192 - 2048 * 2047 // 2 * causal
        assert seconds(2048, 8192) == pytest.approx(pairs / 1e6)
        pairs = 64 * 8192 - 64 * 63 // 2 * causal
        assert seconds(64, 8192) == pytest.approx(pairs / 1e5)


def test_a_profile_survives_its_file(tmp_path) -> None:
    grid().save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == grid()


@pytest.mark.parametrize(
    "damage",
    [
        lambda saved: saved.pop("full_seconds"),
        lambda saved: saved.update(format=99),
        lambda saved: saved.update(lengths=[64, 64, 128, 256]),
        lambda saved: saved["full_seconds"][0].pop(),
        lambda saved: saved["diagonal_seconds"][1].__setitem__(1, -1.0),
        lambda saved: saved["full_seconds"].__setitem__(0, 1.0),
        lambda saved: saved.update(backward_full_seconds=[[1.0]]),
    ],
)
def test_a_corrupt_profile_is_refused(tmp_path, damage) -> None:
    path = tmp_path / "profile.json"
    grid().save(path)
    saved = json.loads(path.read_text())
    damage(saved)
    path.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="no usable profile"):
        Profile.load(path)


def test_profiling_this_machine(tmp_path, capsys) -> None:
    path = tmp_path / "profile.json"
    flags = ["--heads", "2", "--kv-heads", "1", "--head-dim", "8", "--max-length", "256"]
    assert profiling.main([*flags, "--output", str(path)]) == 0
    found = Profile.load(path)
    assert found.lengths == (1, 8, 32, 64, 128, 256)
    # A decoded token is on the grid.
    assert predict(found, 1, 256, 256) == pytest.approx(found.full_seconds[0][-1])
    assert found.shape == AttentionShape(2, 1, 8, 4)
    assert predict(found, 256, 256, 256 * 256) > predict(found, 32, 32, 32 * 32)
    both = found.of_training()
    assert isinstance(both, BothPasses)
    assert both.ratio == found.backward.diagonal_seconds[-1][-1] / found.diagonal_seconds[-1][-1]
    assert "held-out points: median error" in capsys.readouterr().out


def test_a_model_is_profiled_with_the_heads_of_a_rank(tmp_path, capsys) -> None:
    path = tmp_path / "profile.json"
    given = "--model llama-3.2-1b --tensor-model-parallel-size 4 --max-length 64".split()
    assert profiling.main([*given, "--output", str(path)]) == 0
    assert Profile.load(path).shape == AttentionShape(8, 2, 64, 4)
    assert profiling.main([*given, "--forward-only", "--output", str(path)]) == 0
    forward = Profile.load(path)
    assert forward.backward is None
    assert forward.of_training() is forward


def test_training_balances_both_passes() -> None:
    """Where short tasks' backward passes take longer, short tasks count for more."""
    forward = grid()
    shape = np.array(forward.diagonal_seconds).shape
    slow = np.full(shape, 3.0)
    slow[0] = 9.0
    tables = (
        tuple(map(tuple, (slow * np.array(table)).tolist()))
        for table in (forward.full_seconds, forward.diagonal_seconds)
    )
    names = "backward_full_seconds", "backward_diagonal_seconds"
    both = replace(forward, **dict(zip(names, tables, strict=True)))
    cost_model = both.of_training()
    short, long = forward.lengths[0], forward.lengths[-1]
    for tokens, times in ((short, 10 / 4), (long, 1.0)):
        columns = np.array([tokens]), np.array([tokens]), np.array([tokens * tokens])
        expected = times * forward.seconds(*columns)
        assert cost_model.seconds(*columns) == pytest.approx(expected)
    with pytest.raises(ValueError, match="backward times of full tasks"):
        replace(both, backward_full_seconds=None)


def write_log(path: Path, losses: dict[int, float]) -> Path:
    path.write_text("noise\n" + "\n".join(LINE.format(i, loss) for i, loss in losses.items()))
    return path


def test_comparing_losses(tmp_path, capsys) -> None:
    first = write_log(tmp_path / "first.log", {1: 5.0, 2: 4.0, 3: 3.0})
    near = write_log(tmp_path / "near.log", {1: 5.00001, 2: 4.0, 3: 3.0})
    far = write_log(tmp_path / "far.log", {1: 5.0, 2: 4.1, 3: 3.0})
    golden = tmp_path / "golden.json"
    assert compare_losses.main([str(first), "--save-golden", str(golden), "--note", "here"]) == 0
    assert compare_losses.main([str(near), str(golden)]) == 0
    assert compare_losses.main([str(far), str(golden)]) == 1
    assert "differ from iteration 2 on" in capsys.readouterr().out
    assert compare_losses.main([str(far), str(golden), "--tolerance", "0.1"]) == 0
    assert compare_losses.main([str(far), str(tmp_path / "missing.log")]) == 2


def one_f_one_b(stage: int, stages: int, micro_batches: int, seconds: dict[str, float]):
    """A stage's passes in the order of 1F1B."""
    ahead = min(micro_batches, stages - stage - 1)
    order = [("forward", n) for n in range(ahead)]
    for number in range(micro_batches - ahead):
        order += [("forward", ahead + number), ("backward", number)]
    order += [("backward", number) for number in range(micro_batches - ahead, micro_batches)]
    return [TimedPass(direction, number, seconds[direction]) for direction, number in order]


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 5), (4, 8), (4, 2)])
def test_replayed_pipelines(stages: int, micro_batches: int) -> None:
    """Equal passes take as long as the book says; a slow one holds up what waits for it."""
    seconds = {"forward": 1.0, "backward": 2.0}
    passes = [one_f_one_b(stage, stages, micro_batches, seconds) for stage in range(stages)]
    assert replay(passes) == 3.0 * (micro_batches + stages - 1)
    last = passes[-1][-1]
    passes[-1][-1] = last._replace(seconds=last.seconds + 5.0)
    assert replay(passes) == 3.0 * (micro_batches + stages - 1) + 5.0
    with pytest.raises(AssertionError, match="wait for each other"):
        replay([[TimedPass("backward", 0, 1.0)], [TimedPass("forward", 0, 1.0)]])


def test_fitted_passes_and_ticks() -> None:
    rest, per_pair = fit([0, 10, 20], [1.0, 3.0, 5.0])
    assert rest == pytest.approx(1.0)
    assert per_pair == pytest.approx(0.2)
    assert fit([7, 7], [1.0, 2.0]) == (1.5, 0.0)
    assert ticks_seconds([np.array([1.0, 3.0]), np.array([2.0, 0.5])]) == 5.0


def ranked(measured: list[float], predicted: list[float], plans: str = "abc") -> bool:
    found = [
        Prediction(1, "mix", name, "whole", *each)
        for name, *each in zip("xyz", measured, predicted, plans, strict=True)
    ]
    return not any(map(is_misplaced, pairs_apart(found)))


def test_predictions_rank_as_measured_or_not() -> None:
    assert ranked([1.0, 2.0, 3.0], [1.0, 1.5, 2.0])
    assert not ranked([1.0, 2.0, 3.0], [1.0, 2.0, 1.5])
    rows = [("tiles", 1.0, 1.0), ("packed", 2.0, 2.0), (PLAIN, 2.5, 1.5)]
    found = [Prediction(1, "mix", name, "whole", *seconds, plans=name) for name, *seconds in rows]
    assert ranking(found) == "ranked as measured, but for packed and plain (20.0% apart)"
    assert ranking([*found[:2], replace(found[2], predicted=3.0)]) == "ranked as measured"
    # A simulator for which all is alike has not ranked anything.
    assert not ranked([1.0, 2.0, 3.0], [1.0, 1.004, 1.008])
    # What cannot be told apart is not ranked, nor what is the same.
    assert ranked([1.0, 1.01, 3.0], [1.0, 0.9, 2.0])
    assert ranked([1.0, 2.0, 3.0], [1.0, 1.0, 2.0], plans="aab")
    assert not ranked([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], plans="aab")


def test_plain_megatron_is_predicted_beside_the_schedulers() -> None:
    setting = Setting(
        *(2, 1, 1, 2048, 2, 128, 2, 1),
        *(
            ("packed", "per-document-cp", "tiles"),
            ("whole", "ping-pong"),
            (0.1,),
            ("long-tail",),
            0,
        ),
    )
    grouped = replace(setting, megatron_flags=("--distca-context-parallel-size", "2"))
    machine = replace(CLUSTERS["dgx-a100"], gpus_per_node=1, peak_tflops=1e-3, launch_seconds=0.0)
    seconds = {"long-tail": {name: [1.0, 2.0] for name in setting.ways()}}
    model, shape = ModelSize(2, 128, 4, 1, 32, 320, 512), AttentionShape(4, 1, 32, 4)
    profile = replace(grid(), shape=shape)
    found = predictions_of(setting, model, seconds, machine, profile)
    assert [each.way for each in found] == list(setting.ways())
    assert all(each.measured == 3.0 and each.predicted > 0 for each in found)
    plain = found[0]
    packed, per_document, tiles = (each for each in found if each.mode == "whole")
    # The same work, but for planning, and gradients are reduced behind other passes.
    assert packed.predicted == pytest.approx(plain.predicted, rel=0.3)
    # Documents fit a rank: the same plans, unless context parallelism has larger groups.
    assert packed.plans == per_document.plans != tiles.plans
    halves = [each for each in found if each.mode == "ping-pong"]
    assert {each.plans for each in halves}.isdisjoint({packed.plans, tiles.plans})
    shared = predictions_of(grouped, model, seconds, machine, profile)
    changed = {a.way for a, b in zip(found, shared, strict=True) if a.plans != b.plans}
    assert changed == {"per-document-cp, whole", "per-document-cp, ping-pong"}
    # Two stages of one layer have half of the work each, and are idle for a third of the time.
    stages = replace(setting, stages=2, micro_batches=2, modes=("whole",))
    seconds = {"long-tail": {name: [1.0, 2.0] for name in stages.ways()}}
    piped = predictions_of(stages, model, seconds, machine, profile)
    assert [each.way for each in piped] == list(stages.ways())
    assert all(each.stages == 2 for each in piped)
    assert piped[0].predicted == pytest.approx(1.5 * plain.predicted, rel=0.3)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["tune"], "say what to tune: overlap, partitions, groups, sparsity"),
        (["verify", "--output", "FILE"], "is a file: give a folder"),
        (["profile", "--output", "p.json", "--threads", "5000"], "this machine has"),
    ],
)
def test_what_cannot_run_is_refused_in_a_line(
    words: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SystemExit) as ended:
        main([str(file) if word == "FILE" else word for word in words])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line
