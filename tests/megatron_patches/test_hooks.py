"""The table of replaced names, on the installed megatron-core with Megatron-LM's own loop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from support.pretraining import ROOT

pytest.importorskip("megatron.core")

SCAN = """
import json, signal, sys, warnings

warnings.simplefilter("ignore")
from megatron.training import arguments, checkpointing, initialize, pretrain, training

from support.identities import PREFIXES, changed, identities, is_code


def handlers():
    wakeup = signal.set_wakeup_fd(-1)
    return [wakeup, *(signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM))]


import torch.distributed.checkpoint
from megatron_patches import cpu

if sys.argv[1:]:
    # Loaded for the table, so that their names are there before.
    cpu.prepare_process()
before, heard = identities(*PREFIXES), handlers()
from megatron_patches.megatron_lm import with_distca

ours = with_distca(pretrain)
sys.argv += ["--num-layers", "2", "--distca-tolerance", "0.1"]
arguments.parse_args(ignore_unknown_args=True)
args = arguments.parse_args()
assert args.distca_tolerance == 0.1
different = changed(before, identities(*PREFIXES))
print(json.dumps({
    "objects": sum(map(is_code, before.values())),
    "changed": sorted(different),
    "signals": handlers() != heard,
    "distca": args.distca,
}))
"""


def scan(*flags: str) -> dict[str, Any]:
    """Runs a script with the two lines in a fresh process, up to the parsed command line."""
    done = subprocess.run(
        [sys.executable, "-c", SCAN, *flags],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_without_distca_nothing_of_megatron_and_torch_is_another_object() -> None:
    found = scan()
    assert found["objects"] > 10_000
    assert found["changed"] == []
    assert not found["signals"]
    assert not found["distca"]


def test_with_distca_exactly_the_names_of_the_table_are() -> None:
    from megatron_patches import hooks

    found = scan("--distca")
    assert found["distca"]
    assert not found["signals"]
    rows = [hook for hook in hooks.TABLE if hook.needed]
    everywhere = {hook.name for hook in rows if hook.module.endswith(".*")}
    expected = {
        f"{hook.module}:{hook.name}"
        for hook in rows
        if not hook.module.endswith(".*") and hook.module.startswith(("megatron.", "torch.dist"))
    }
    changed = {name for name in found["changed"] if name.split(":")[1] not in everywhere}
    # A function that is imported by name is only changed where its callers look it up.
    assert changed == expected
    assert {name.split(":")[1] for name in set(found["changed"]) - changed} <= everywhere


def test_each_row_of_the_table_is_there_in_the_installed_version() -> None:
    from megatron_patches import hooks

    for hook in hooks.TABLE:
        if hook.needed and not hook.module.endswith(".*"):
            for owner, leaf in hook.places():
                assert hasattr(owner, leaf), (hook.module, hook.name)
        assert hook.until is None or hook.since < hook.until
        assert hook.why.startswith(("ours ", "theirs ")), hook
    for hook in hooks.MENDS:
        assert hook.defect is not None
        assert hook.defect.startswith("https://github.com/")


def test_settings_of_our_model_are_set() -> None:
    from megatron_patches import hooks

    code = "".join(file.read_text() for file in (ROOT / "megatron_patches").rglob("*.py"))
    for name in hooks.SETTINGS:
        assert f".{name.rsplit('.', 1)[1]} = " in code


def test_rows_are_applied_once_and_undone(monkeypatch) -> None:
    from megatron_patches.hooks import Hook

    class Base:
        def inherited(self) -> str:
            return "theirs"

    class Owner(Base):
        @staticmethod
        def of_class() -> str:
            return "theirs"

    module = type(sys)("megatron.of_a_test")
    module.Owner, module.function = Owner, lambda: "theirs"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = ("function", "Owner.of_class", "Owner.inherited")
    rows = [
        Hook(module.__name__, name, "a test", lambda theirs, given: (theirs, given))
        for name in names
    ]
    before = dict(vars(module)), dict(vars(Owner))
    for given in ("first", "second"):
        for row in rows:
            row.apply(given)
    assert module.function == (before[0]["function"], "first")
    assert Owner.of_class == (before[1]["of_class"].__func__, "first")
    assert Owner.inherited == (Base.inherited, "first")
    for row in rows:
        row.undo()
    assert (dict(vars(module)), dict(vars(Owner))) == before
    with pytest.raises(RuntimeError, match=r"has no megatron\.of_a_test\.gone, which --distca"):
        Hook(module.__name__, "gone", "a test", lambda theirs: theirs).apply()


@pytest.mark.parametrize(
    ("since", "until", "needed"),
    [((0, 1), None, True), ((0, 1), (0, 2), False), ((99, 0), None, False)],
)
def test_rows_are_for_versions_and_installations(since, until, needed) -> None:
    from megatron_patches.hooks import Hook

    def row(when: bool) -> Hook:
        return Hook("a", "b", "a test", lambda _: None, since, until, when=lambda: when)

    assert row(True).needed == needed
    assert not row(False).needed


WAITS = """
import os, sys, warnings

warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from megatron.training import arguments, pretrain as theirs

from megatron_patches.megatron_lm import with_distca


def waits({parameters}):
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = dist.new_group([0])
    print("waits", flush=True)
    # Another rank never comes.
    store.wait(["never"], __import__("datetime").timedelta(seconds=300))


sys.argv = ["script", "--num-layers", "2"]
pretrain = with_distca(waits)
arguments.parse_args()
pretrain({given})
"""


def test_a_plain_rank_that_waits_for_others_ends_by_sigterm() -> None:
    """As one without the two lines does: no handler of ours waits for the interpreter."""
    names = ["train_valid_test_dataset_provider", "model_provider", "forward_step_func"]
    script = WAITS.format(parameters=", ".join(names), given="1, 2, 3")
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == -signal.SIGTERM
