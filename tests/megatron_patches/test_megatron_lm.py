"""The two lines in Megatron-LM's `pretrain_gpt.py`, with the installed `megatron.training`.

A stand-in takes what a script gives to Megatron-LM's `pretrain`, which is not run here.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
import types
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from megatron_patches.pipeline.progress import Progress

FLAGS = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 128 --micro-batch-size 1
    --max-position-embeddings 128 --position-embedding-type rope --attention-dropout 0
    --train-iters 2 --lr 1e-3 --eval-iters 0 --tokenizer-type NullTokenizer --vocab-size 100
    --data-path corpus
""".split()


@dataclass(frozen=True)
class Container:
    """Megatron-LM's configuration from 0.18 on: a model in it wins over the provider."""

    model: str | None = "their configured model"


def theirs(name: str) -> Any:
    return lambda *args, **kwargs: f"Megatron's {name}"


class Script:
    """What Megatron-LM's script does with the two lines.

    Attributes:
        given: what its `pretrain` was called with; empty: not called.
        args: arguments.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from megatron.training import pretrain

        self.signature = inspect.signature(pretrain)
        self.script_parses = "cfg_container" in self.signature.parameters
        self.given: dict[str, Any] = {}
        self.values = {
            "train_valid_test_dataset_provider": theirs("data"),
            "model_provider": theirs("model"),
            "model_type": "model type",
            "forward_step_func": theirs("step"),
        }
        if self.script_parses:
            self.values["cfg_container"] = Container()
        self._monkeypatch = monkeypatch

    def run(self, *flags: str, fails: Exception | None = None) -> dict[str, Any]:
        """Parses, and calls `pretrain`; returns what Megatron-LM's was given."""
        from megatron_patches.megatron_lm import with_distca

        def pretrain(*args: Any, **kwargs: Any) -> None:
            if not self.script_parses:
                self.parse()
            if fails is not None:
                raise fails
            self.given = self.signature.bind(*args, **kwargs).arguments

        pretrain.__signature__ = self.signature  # type: ignore[attr-defined]
        self._monkeypatch.setattr(sys, "argv", ["script", *FLAGS, *flags])
        ours = with_distca(pretrain)
        if self.script_parses:
            self.parse()
        ours(**self.values)
        return self.given

    def parse(self) -> None:
        from megatron.training import arguments, initialize

        self.args = arguments.parse_args()
        validates = arguments if self.script_parses else initialize
        if self.args.distca:
            # Without CUDA Megatron-LM validates nothing that is plain.
            validates.validate_args(self.args, {})
        for module in ("megatron.training", "megatron.training.global_vars"):
            self._monkeypatch.setattr(f"{module}.get_args", lambda: self.args)


@pytest.fixture
def script(monkeypatch) -> Iterator[Script]:
    from megatron_patches import hooks

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    # A rank that fails ends by it.
    monkeypatch.setattr("os._exit", sys.exit)
    # absl, where Megatron imports it, then closes the standard error that pytest put in place.
    monkeypatch.setattr("logging.shutdown", lambda: None)
    yield Script(monkeypatch)
    for hook in hooks.TABLE:
        with contextlib.suppress(ImportError, AttributeError):
            hook.undo()
    for package in ("distca", "megatron_patches"):
        logging.getLogger(package).handlers.clear()
        logging.getLogger(package).propagate = True


def own_documents(args: Namespace, split: str) -> None:
    """As a user's module defines it."""


def test_own_documents_are_given_by_the_function_s_name(script, monkeypatch) -> None:
    from megatron.training import arguments, pretrain

    from megatron_patches.megatron_lm import with_distca

    with_distca(pretrain, documents=own_documents)
    name = f"{__name__}:own_documents"
    parser = arguments.add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    assert parser.parse_args([]).distca_documents == name
    with_distca(pretrain, documents=own_documents)
    other = ["--distca", "--distca-documents", "other:function"]
    parser = arguments.add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    assert parser.parse_args(other).distca_documents == "other:function"
    with pytest.raises(ValueError, match="give a function that a module defines by name"):
        with_distca(pretrain, documents=lambda args, split: None)


def test_without_the_flag_pretrain_gets_what_the_script_gives(script) -> None:
    # Defaults, as a script may give them.
    given = script.run("--distca-tolerance", "0.1", "--distca-trace-iterations", "2", "3")
    assert given.keys() == script.values.keys()
    for name, value in script.values.items():
        assert given[name] is value
    assert not hasattr(script.values["train_valid_test_dataset_provider"], "is_distributed")
    assert script.args.dataloader_type is None
    assert not script.args.calculate_per_token_loss


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--distca-tolerance 2", "--distca-tolerance means nothing"),
        (
            "--distca-scheduler greedy --distca-servers dedicated:1 --no-distca-ping-pong "
            "--distca-trace-iterations 3 4 --distca-whole-documents",
            "--distca-scheduler, --distca-servers, --no-distca-ping-pong, "
            "--distca-trace-iterations, --distca-whole-documents mean nothing",
        ),
    ],
)
def test_flags_of_ours_end_megatrons_own_run_with_a_line(script, flags, named, capsys) -> None:
    """There nothing of ours applies, documents neither."""
    with pytest.raises(SystemExit) as ended:
        script.run(*flags.split())
    assert ended.value.code == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "Warn" not in line)
    assert f"error: {named} in this script without --distca: add --distca, or remove" in line
    assert script.given == {}


def test_with_the_flag_pretrain_gets_ours(script) -> None:
    from megatron_patches.batches.micro_batch import forward_step

    given = script.run("--distca", "--distca-tolerance", "0.2")
    assert given["forward_step_func"] is forward_step
    provider = given["train_valid_test_dataset_provider"]
    assert provider.is_distributed
    # Megatron-LM asks for it where there are virtual stages.
    assert "vp_stage" in inspect.signature(provider).parameters
    assert "vp_stage" in inspect.signature(given["model_provider"]).parameters
    if script.script_parses:
        assert given["cfg_container"] == Container(None)
    assert script.args.distca_tolerance == 0.2
    assert script.args.dataloader_type == "external"
    assert script.args.calculate_per_token_loss


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--distca-tolerance", "-1"], "error: --distca-tolerance"),
        (["--tensorboard-dir", "/proc/x"], "--tensorboard-dir /proc/x cannot be written to"),
        (["--hidden-size", "33"], "error: --hidden-size 33 is not a multiple of"),
        (["--distca-tolerence", "2"], "no --distca-tolerence: did you mean --distca-tolerance?"),
        (["--num-layers", "many"], "argument --num-layers: invalid int value"),
    ],
)
def test_bad_flags_end_the_run_with_a_line(script, flags, message, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        script.run("--distca", *flags)
    assert ended.value.code == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "Warn" not in line)
    assert message in line


def test_other_ranks_leave_it_to_the_first_to_say_so(script, capsys, monkeypatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        script.run("--distca", "--distca-tolerence", "2")
    assert ended.value.code == 2
    assert capsys.readouterr().err == ""


def test_without_the_flag_megatron_refuses_as_ever(script, capsys) -> None:
    with pytest.raises(SystemExit):
        script.run("--num-layers", "many")
    assert capsys.readouterr().err.startswith("usage: ")


def test_lines_after_parsing_are_refused(script, monkeypatch) -> None:
    from megatron_patches.megatron_lm import with_distca

    if not script.script_parses:
        pytest.skip("this Megatron-LM parses the command line itself")
    monkeypatch.setattr(sys, "argv", ["script", "--distca"])
    monkeypatch.setattr("megatron.training.get_args", Namespace)

    def pretrain(*args: Any, **kwargs: Any) -> None:
        pytest.fail("it ran")

    pretrain.__signature__ = script.signature  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="put the two lines after the imports"):
        with_distca(pretrain)(**script.values)


def test_an_unknown_pretrain_is_refused() -> None:
    from megatron_patches.megatron_lm import with_distca

    with pytest.raises(ValueError, match="no parameter model_provider, forward_step_func"):
        with_distca(lambda train_valid_test_dataset_provider: None)


def test_what_runs_on_the_last_rank_alone_is_refused(script) -> None:
    """Megatron-LM would run another forward there, in which other ranks take no part."""
    script.values["process_non_loss_data_func"] = theirs("processing")
    with pytest.raises(ValueError, match=r"process_non_loss_data_func.* give non_loss_data_func,"):
        script.run("--distca")
    assert script.given == {}
    assert script.run().keys() == script.values.keys()
    script.values["non_loss_data_func"] = theirs("collecting")
    assert script.run("--distca")["non_loss_data_func"] is script.values["non_loss_data_func"]


def test_an_argument_that_pretrain_lacks_is_refused_by_its_name(script) -> None:
    script.values["process_non_loss_dat_func"] = None
    message = r"^pretrain\(\) got an unexpected keyword argument 'process_non_loss_dat_func'$"
    with pytest.raises(TypeError, match=message):
        script.run("--distca")


@pytest.mark.parametrize(
    ("flags", "error"), [(["--distca"], SystemExit), ([], ValueError)], ids=["distca", "plain"]
)
def test_a_failure_ends_the_rank_with_distca_alone(script, flags, error, capsys) -> None:
    with pytest.raises(error):
        script.run(*flags, fails=ValueError("no such corpus"))
    assert ("error: no such corpus" in capsys.readouterr().err) == bool(flags)


@pytest.fixture
def args(monkeypatch) -> Namespace:
    """Arguments that functions of Megatron-LM's loop find."""
    found = Namespace(
        sft=True,
        distca=True,
        seq_length=10,
        full_validation=True,
        multiple_validation_sets=False,
        consumed_valid_samples=0,
        eval_iters=1,
        exit_signal_handler=False,
        curr_iteration=3,
    )
    monkeypatch.setattr("megatron.training.get_args", lambda: found)
    return found


def test_evaluation_averages_over_tokens_also_with_sft(args) -> None:
    from megatron_patches.loop.evaluation import Evaluation, mean_over_tokens

    def ended_by_a_signal(eval_iters: int) -> tuple[None, None, bool]:
        assert not args.sft
        return None, None, True

    run: Any = types.SimpleNamespace(evaluation=Evaluation(), progress=Progress())
    assert mean_over_tokens(ended_by_a_signal, run)(eval_iters=2) == (None, None, True)
    assert args.sft


def test_whole_validation_sets_are_ours_to_count_and_to_repeat(args) -> None:
    from megatron_patches.loop.evaluation import Evaluation, save_then_evaluate
    from megatron_patches.loop.megatron_hooks import unless_endless
    from megatron_patches.pipeline.data_iterators import FullValidationIterator

    given = FullValidationIterator(iter(()), 7)  # type: ignore[arg-type]
    # Megatron-LM wraps iterators.
    wrapped = types.SimpleNamespace(iterable=given)
    run: Any = types.SimpleNamespace(evaluation=Evaluation(), progress=Progress())
    counted: list[Any] = []
    save_then_evaluate(lambda *_: counted.append(args.eval_iters), run)("at", None, wrapped, [], 3)
    assert counted == [[7]]
    cyclic_iter = unless_endless(lambda iterable: iter([iterable]), None)  # type: ignore[arg-type]
    assert cyclic_iter(given) is given
    assert next(cyclic_iter("theirs")) == "theirs"


def test_checkpoints_arguments_are_those_our_data_goes_on_from(args, monkeypatch) -> None:
    from megatron_patches.loop import megatron_hooks

    found: list[Any] = []
    monkeypatch.setattr(
        megatron_hooks, "go_on_from", lambda *given: found.append(given) or "resumed"
    )
    run = types.SimpleNamespace(config="config")
    check = megatron_hooks.go_on_in_data(lambda saved: None, run)  # type: ignore[arg-type]
    check(Namespace(consumed_train_samples=0))
    assert found == [({"consumed_train_samples": 0}, "config", args)]
    assert run.config == "resumed"


def test_the_schedule_is_made_once_and_megatrons_without_the_flag() -> None:
    from megatron_patches.flags.config import DistcaConfig
    from megatron_patches.loop.megatron_hooks import own_schedule
    from megatron_patches.pipeline.tick_pipeline import TickPipeline

    def schedule(enabled: bool) -> Any:
        run: Any = types.SimpleNamespace(config=DistcaConfig(enabled), progress=Progress())
        return own_schedule(lambda: lambda **named: named, run)

    ours = schedule(enabled=True)
    assert isinstance(ours(), TickPipeline)
    assert ours() is ours()
    # Its samples lie one after the other.
    theirs = schedule(enabled=False)()
    assert theirs(seq_length=8, micro_batch_size=2) == {"seq_length": 16, "micro_batch_size": 1}
