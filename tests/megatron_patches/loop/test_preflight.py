"""What flags name is tried before the model is built, and a problem of any rank ends all."""

from __future__ import annotations

import logging
import shutil
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_patches.flags.config import DistcaConfig
from megatron_patches.flags.sizes import checkpoint_bytes
from megatron_patches.loop import preflight as module
from megatron_patches.loop.checkpoint_folder import TRACKER
from megatron_patches.loop.preflight import (
    check_boards,
    check_checkpoint,
    check_metrics,
    check_read,
    check_save_is_shared,
    check_trace,
    lock_save,
    preflight,
)
from support.arguments import parse
from support.checkpoints import write_checkpoint


def bytes_tokens(corpus: str, *flags: str) -> Namespace:
    """Flags of a run on a corpus of bytes."""
    given = ["--vocab-size", "257", "--data-path", corpus, "--eval-iters", "0"]
    args = parse(*given, *flags)
    args.rank = 0
    return args


def lock_save_of(args: Namespace) -> None:
    """Locks the folder that a run saves to, if it has one."""
    if args.save is not None:
        lock_save(Path(args.save), checkpoint_bytes(args), {})


def try_all_that_is_written(args: Namespace) -> None:
    lock_save_of(args)
    check_boards(args)
    check_trace(DistcaConfig.from_args(args))
    check_metrics(DistcaConfig.from_args(args))


def test_a_checkpoint_needs_its_room_from_the_start(tmp_path, monkeypatch) -> None:
    """Of 4 layers of 64 x 64 x 12 and 1024 x 64 embeddings, in float32 with Adam's moments."""
    args = parse("--save", str(tmp_path / "new"))
    parameters = 4 * 12 * 64 * 64 + 1024 * 64
    assert checkpoint_bytes(args) == parameters * 12
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=parameters * 12))
    lock_save_of(args)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=parameters * 12 - 1))
    with pytest.raises(ValueError, match=r"0\.00 GB free, but .* takes at least 0\.00 GB"):
        lock_save_of(args)


def test_what_a_failed_save_has_left_is_named_where_room_is_missing(tmp_path, monkeypatch) -> None:
    args = parse("--save", str(tmp_path))
    write_checkpoint(tmp_path, args, 2)
    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / "iter_0000004" / "__0_0.distcp").write_bytes(bytes(1000))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    with pytest.raises(ValueError, match=r"saves that failed have left \(iter_0000004\), or give"):
        lock_save_of(args)


def test_another_run_s_checkpoints_are_not_overwritten(corpus, tmp_path) -> None:
    ours, other = tmp_path / "ours", tmp_path / "other"
    args = bytes_tokens(corpus, "--distca", "--save", str(ours))
    config = DistcaConfig.from_args(args)
    check_read(config, args)
    for folder in (ours, other):
        write_checkpoint(folder, args, 2)
    with pytest.raises(ValueError, match=r"up to iteration 2, which .*: give --load .* to go on"):
        check_read(config, args)
    args.load = str(other)
    with pytest.raises(ValueError, match=r"--save .*ours has checkpoints up to iteration 2"):
        check_read(config, args)
    # Another spelling of the same folder; and a run without --distca, where nothing changes.
    args.load = f"{ours}/../ours"
    check_read(config, args)
    args.load = None
    check_read(DistcaConfig.from_args(bytes_tokens(corpus)), args)


@pytest.mark.parametrize(
    ("flags", "each"),
    [
        ("--bf16", 14),
        ("--use-distributed-optimizer", 16),
        ("--bf16 --use-distributed-optimizer", 14),
        ("--bf16 --no-save-optim", 2),
        ("--untie-embeddings-and-output-weights", 12),
    ],
)
def test_bytes_of_a_parameter(flags, each) -> None:
    args = parse(*flags.split())
    embeddings = 2 if "--untie" in flags else 1
    assert checkpoint_bytes(args) == (4 * 12 * 64 * 64 + embeddings * 1024 * 64) * each
    # Megatron-LM's loop has further flags.
    args.exp_avg_dtype = args.exp_avg_sq_dtype = torch.bfloat16
    assert (checkpoint_bytes(args) < checkpoint_bytes(parse(*flags.split()))) == (each > 2)


def test_a_profile_of_another_shape_is_found(corpus, tmp_path) -> None:
    from distca.cost.profile import Profile
    from distca.cost.volume import AttentionShape

    file = tmp_path / "profile.json"
    args = bytes_tokens(corpus, "--distca", "--distca-profile", str(Path(__file__)))
    with pytest.raises(ValueError, match="no usable profile"):
        check_read(DistcaConfig.from_args(args), args)
    shape, ones = AttentionShape(8, 4, 64, 2), ((1.0, 1.0), (1.0, 1.0))
    Profile((128, 256), ones, ones, shape, {}).save(file)
    args.distca_profile = file
    with pytest.raises(ValueError, match=r"was measured for .* profile that"):
        check_read(DistcaConfig.from_args(args), args)


def read(args: Namespace) -> None:
    check_read(DistcaConfig.from_args(args), args)


def test_splits_that_are_not_read_may_be_empty(corpus) -> None:
    read(bytes_tokens(corpus, "--split", "1,0,0"))
    with pytest.raises(ValueError, match=r"the valid split of .* is empty"):
        read(bytes_tokens(corpus, "--split", "1,0,0", "--eval-iters", "1"))


def test_a_checkpoint_s_model_is_compared_before_it_is_built(tmp_path) -> None:
    saved = parse("--num-layers", "8", "--group-query-attention", "--num-query-groups", "2")
    folder = write_checkpoint(tmp_path, saved)
    check = ["--load", str(tmp_path), "--group-query-attention", "--num-query-groups"]
    check_checkpoint(parse(*check, "2", "--num-layers", "8"))
    with pytest.raises(ValueError, match=r"--num-layers 8 \(now 4\), --num-query-groups 2 \(now 4"):
        check_checkpoint(parse(*check, "4"))
    # Without groups Megatron-LM has 1 there, which nobody reads.
    args = parse("--load", str(tmp_path))
    shutil.rmtree(folder)
    write_checkpoint(tmp_path, args)
    args.num_query_groups = 1
    check_checkpoint(args)


def test_a_checkpoint_of_another_format_is_left_to_the_loop(tmp_path) -> None:
    folder = write_checkpoint(tmp_path, parse("--num-layers", "8"))
    args = parse("--load", str(tmp_path))
    (folder / ".metadata").unlink()
    check_checkpoint(args)
    folder.rename(tmp_path / "release")
    (tmp_path / TRACKER).write_text("release\n")
    check_checkpoint(args)


def test_a_release_is_compared_but_for_its_progress_and_optimizer(tmp_path) -> None:
    saved = parse("--num-layers", "8", "--optimizer", "sgd")
    write_checkpoint(tmp_path, saved, 700).rename(tmp_path / "release")
    (tmp_path / TRACKER).write_text("release\n")
    load = ["--load", str(tmp_path)]
    check_checkpoint(parse(*load, "--num-layers", "8"))
    with pytest.raises(ValueError, match=r"release is .* with --num-layers 8 \(now 4\)"):
        check_checkpoint(parse(*load))
    parallel = ["--tensor-model-parallel-size", "4", "--make-vocab-size-divisible-by", "512"]
    with pytest.raises(ValueError, match=r"release .* to 1024 rows, but this run pads it to 2048"):
        check_checkpoint(parse(*load, "--num-layers", "8", *parallel))
    # A converter may write no flags.
    torch.save({}, tmp_path / "release" / "common.pt")
    check_checkpoint(parse(*load))


def test_flags_that_cannot_be_read_are_named_with_the_checkpoint_to_load(tmp_path) -> None:
    write_checkpoint(tmp_path, parse(), 5)
    torch.save(Namespace(run=Path), write_checkpoint(tmp_path, parse()) / "common.pt")
    with pytest.raises(ValueError, match=r"iter_0000007: its flags cannot .* --ckpt-step 5$"):
        check_checkpoint(parse("--load", str(tmp_path)))


def test_a_missing_checkpoint_names_those_that_are_there(tmp_path) -> None:
    write_checkpoint(tmp_path, parse())
    with pytest.raises(ValueError, match=r"iter_0000008 is not there; --load has iter_0000007$"):
        check_checkpoint(parse("--load", str(tmp_path), "--ckpt-step", "8"))
    empty = ["--load", str(tmp_path / "empty")]
    check_checkpoint(parse(*empty))
    with pytest.raises(ValueError, match="has no checkpoint: give another folder"):
        check_checkpoint(parse(*empty, "--exit-on-missing-checkpoint"))


@pytest.mark.parametrize(
    "flag",
    ["--save", "--tensorboard-dir", "--wandb-save-dir", "--distca-trace", "--distca-metrics"],
)
@pytest.mark.parametrize("place", ["below a file", "without permission", "a file or folder"])
def test_places_that_cannot_be_written_to_are_named(flag, place, tmp_path, monkeypatch) -> None:
    """Root is not stopped by permissions, but where the kernel makes the files."""
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: object())
    (tmp_path / "file").touch()
    is_file = flag in ("--distca-trace", "--distca-metrics")
    path = {
        "below a file": tmp_path / "file" / "below",
        "without permission": Path("/proc/self/x" if is_file else "/proc/self"),
        "a file or folder": tmp_path if is_file else tmp_path / "file",
    }[place]
    args = parse("--distca", "--wandb-project", "w", flag, str(path))
    args.rank = 0
    with pytest.raises(ValueError, match=f"{flag} {path} ") as refused:
        try_all_that_is_written(args)
    assert ": give " in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_trying_leaves_nothing_behind(tmp_path) -> None:
    trace = tmp_path / "traces" / "trace.json"
    args = parse("--distca", "--distca-trace", str(trace), "--tensorboard-dir", str(tmp_path))
    try_all_that_is_written(args)
    assert list(tmp_path.rglob("*")) == [trace.parent]


def ends_of(problems: dict[int, str], save: Path | None) -> tuple[Any, list[str]]:
    """How this rank's preflight ends where ranks have problems, and what it logs. Collective."""
    rank = dist.get_rank()
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(module.__name__).addHandler(handler)
    args = parse()
    args.rank, args.save = rank, save

    def check(*_: Any) -> None:
        if rank in problems:
            raise ValueError(problems[rank])

    try:
        with mock.patch.object(module, "check_read", check), preflight(DistcaConfig(), args, {}):
            return None, logged
    except SystemExit as end:
        return end.code, logged
    finally:
        logging.getLogger(module.__name__).removeHandler(handler)


def test_a_problem_of_one_rank_ends_all_with_a_line_of_the_first(ranks, tmp_path) -> None:
    def run(problems: dict[int, str], save: Path | None = None) -> Any:
        return ranks.run(ends_of, problems, save, world_size=2)

    assert run({}, tmp_path / "save") == [(None, []), (None, [])]
    assert run({0: "bad", 1: "bad"}) == [(2, ["error: bad"]), (2, [])]
    (code, (line,)), others = run({1: "no data here"})
    assert (code, others) == (2, (2, []))
    assert line.startswith("error: rank 1 on ")
    assert line.endswith(": no data here")
    (tmp_path / "file").touch()
    (code, (line,)), others = run({}, tmp_path / "file")
    assert (code, others) == (2, (2, []))
    assert "--save" in line


def test_a_folder_that_only_the_first_rank_sees_is_found(tmp_path) -> None:
    with pytest.raises(ValueError, match="a folder that all of them share"):
        check_save_is_shared(tmp_path, 1)
    lock_save(tmp_path, 0, {})
    check_save_is_shared(tmp_path, 1)


def test_a_lost_tracker_is_named_with_what_it_should_hold(tmp_path) -> None:
    write_checkpoint(tmp_path, parse())
    (tmp_path / TRACKER).unlink()
    with pytest.raises(ValueError, match=r"is missing, but there .* write 7 into that file"):
        check_checkpoint(parse("--load", str(tmp_path)))
    # One that is asked for needs no tracker.
    check_checkpoint(parse("--load", str(tmp_path), "--ckpt-step", "7"))
    # What an interrupted first save leaves is no checkpoint.
    (tmp_path / "iter_0000007" / "metadata.json").unlink()
    check_checkpoint(parse("--load", str(tmp_path)))


@pytest.mark.parametrize(
    ("length", "refused"),
    [
        ("--train-iters 6", True),
        ("--train-iters 7", False),
        ("--train-samples 19", True),
        ("--train-samples 20", False),
    ],
)
def test_a_checkpoint_beyond_the_end_of_the_run_is_refused(
    tmp_path, caplog, length, refused
) -> None:
    """At the end, of which Megatron-LM says nothing, a warning says that nothing is left."""
    saved = parse()
    saved.consumed_train_samples = 20
    write_checkpoint(tmp_path, saved)
    args = parse("--load", str(tmp_path), length=length)
    args.rank = 0
    if not refused:
        check_checkpoint(args)
        assert f"has done {length}: nothing is left to train" in caplog.text
        return
    with pytest.raises(ValueError, match=f"has done .*, more than {length}: raise it"):
        check_checkpoint(args)
    for more in ("--finetune", "--skip-train"):
        check_checkpoint(parse("--load", str(tmp_path), more, length=length))


def test_checksums_that_a_checkpoint_lacks_are_not_asked_for(tmp_path) -> None:
    folder = write_checkpoint(tmp_path, parse())
    args = parse("--load", str(tmp_path))
    args.verify_integrity = True
    with pytest.raises(ValueError, match="was saved without --verify-integrity"):
        check_checkpoint(args)
    (folder / "integrity.json").touch()
    check_checkpoint(args)
