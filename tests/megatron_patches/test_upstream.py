"""The two lines in Megatron-LM's `pretrain_gpt.py`, without Megatron-LM.

Its `megatron.training` is in no wheel for Python 3.11: a stand-in calls what Megatron-LM calls, in
the form of 0.17, which parses in `pretrain`, and of 0.19, whose script parses before.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import types
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch


@dataclass(frozen=True)
class Container:
    """Megatron-LM's configuration from 0.18 on: a model in it wins over the provider."""

    model: str | None = "their configured model"


def validate(args: Namespace, defaults: dict[str, Any]) -> Namespace:
    """Checks flags by an assertion, as Megatron-LM does."""
    if args.their_flag == 13:
        # As an assertion has it, which pytest writes anew in tests.
        raise AssertionError
    return args


class MegatronTraining:
    """What Megatron-LM's `pretrain` does with its arguments, in short."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, script_parses: bool) -> None:
        self.args = Namespace()
        self.script_parses = script_parses
        self.modules = {
            name: types.ModuleType(f"megatron.training{name}")
            for name in (
                "",
                ".arguments",
                ".checkpointing",
                ".global_vars",
                ".initialize",
                ".training",
            )
        }
        for name, module in self.modules.items():
            monkeypatch.setitem(sys.modules, f"megatron.training{name}", module)
        for holder in ("", ".global_vars"):
            self.modules[holder].__dict__["get_args"] = lambda: self.args
        self.modules[".arguments"].__dict__["add_megatron_arguments"] = self.add_arguments
        validates = ".arguments" if script_parses else ".initialize"
        self.modules[validates].__dict__["validate_args"] = validate
        checkpointing = self.modules[".checkpointing"].__dict__
        checkpointing["check_checkpoint_args"] = lambda saved: None
        if script_parses:
            checkpointing["maybe_msc"] = types.SimpleNamespace(open=open)
        else:
            checkpointing["open_file"] = open
        training = self.modules[".training"].__dict__
        training["get_forward_backward_func"] = lambda: "Megatron's schedule"
        training["setup_model_and_optimizer"] = lambda: self.order.append("built")
        self.order: list[Any] = []
        for holder in ("", ".global_vars"):
            self.modules[holder].__dict__["get_tokenizer"] = lambda: Namespace(vocab_size=99)
        training["train_step"] = lambda: ({"lm loss": torch.ones(1)}, 0, None)
        training["evaluate"] = lambda: self.args.sft
        training["evaluate_and_print_results"] = lambda *_: self.args.eval_iters
        training["cyclic_iter"] = lambda iterable: iter([iterable])
        training["save_checkpoint"] = training["load_checkpoint"] = lambda: None
        monkeypatch.setattr("megatron_patches.cpu.adapt_megatron_training", lambda: None)

    def add_arguments(self, parser: ArgumentParser) -> ArgumentParser:
        parser.add_argument("--dataloader-type", default="single")
        parser.add_argument("--calculate-per-token-loss", action="store_true")
        parser.add_argument("--their-flag", type=int)
        parser.add_argument("--tensorboard-dir")
        return parser

    def parse(self) -> None:
        parser = self.modules[".arguments"].__dict__["add_megatron_arguments"](ArgumentParser())
        self.args = parser.parse_args(self.command_line)
        self.args.rank, self.args.seq_length, self.args.async_save = 0, 10, False
        self.args.eval_interval = None
        self.args.sft, self.args.multiple_validation_sets = True, False
        module = self.modules[".arguments" if self.script_parses else ".initialize"]
        module.__dict__["validate_args"](self.args, {})

    def run(self, data: Any, model: Any, step: Any) -> None:
        self.modules[".training"].__dict__["setup_model_and_optimizer"]()
        saved = Namespace(consumed_train_samples=0)
        self.modules[".checkpointing"].__dict__["check_checkpoint_args"](saved)
        self.called = [
            data((1, 2, 3)),
            model(pre_process=True) if callable(model) else model,
            step("iterator", "model"),
            self.modules[".training"].__dict__["get_forward_backward_func"](),
        ]
        self.evaluates_as_sft = self.modules[".training"].__dict__["evaluate"]()
        self.logged = self.modules[".training"].__dict__["train_step"]()[0]

    def pretrain_017(
        self,
        train_valid_test_dataset_provider: Any,
        model_provider: Any,
        model_type: Any,
        forward_step_func: Any,
        extra_args_provider: Any = None,
        args_defaults: Any = None,
    ) -> None:
        self.parse()
        self.run(train_valid_test_dataset_provider, model_provider, forward_step_func)

    def pretrain_019(
        self,
        cfg_container: Any,
        train_valid_test_dataset_provider: Any,
        model_type: Any,
        forward_step_func: Any,
        model_provider: Any = None,
    ) -> None:
        model = cfg_container.model or model_provider
        self.run(train_valid_test_dataset_provider, model, forward_step_func)

    command_line: list[str]
    called: list[Any]
    logged: dict[str, Any]
    evaluates_as_sft: bool


def theirs(name: str) -> Any:
    return lambda *args, **kwargs: f"Megatron's {name}"


def refuse_tolerance(args: Namespace) -> None:
    if args.distca_tolerance > 1:
        raise ValueError("too tolerant")


@pytest.fixture(params=["0.17", "0.19"])
def megatron(monkeypatch, request):
    from megatron_patches import upstream

    monkeypatch.setattr(upstream._Providers, "model", lambda self, **kwargs: "our model")
    monkeypatch.setattr(
        upstream._Providers, "__init__", lambda self, job: setattr(self, "data_iterators", our_data)
    )
    monkeypatch.setattr(
        "megatron.core.num_microbatches_calculator.get_current_global_batch_size", lambda: 4
    )

    def preflight(args: Namespace, told: Mapping[str, str]) -> Any:
        made.order.append(args.vocab_size)
        return contextlib.nullcontext()

    monkeypatch.setattr("megatron_patches.loop.preflight.preflight", preflight)
    # A rank that fails ends by it.
    monkeypatch.setattr("os._exit", sys.exit)
    # absl, where Megatron imports it, then closes the standard error that pytest put in place.
    monkeypatch.setattr("logging.shutdown", lambda: None)
    made = MegatronTraining(monkeypatch, script_parses=request.param == "0.19")
    yield made
    for package in ("distca", "megatron_patches"):
        logging.getLogger(package).handlers.clear()
        logging.getLogger(package).propagate = True


@pytest.fixture
def gone_on_from(monkeypatch) -> list[Any]:
    """Arguments of the checkpoints from which our data goes on."""
    from megatron_patches.loop import megatron_hooks

    found: list[Any] = []
    monkeypatch.setattr(megatron_hooks, "go_on_from", lambda saved, args: found.append(saved))
    return found


def our_data(samples: Any) -> str:
    return "our data"


def run(megatron: MegatronTraining, *command_line: str) -> MegatronTraining:
    """Does what a script with the two lines does."""
    from megatron_patches import upstream
    from megatron_patches.loop.job import DataIterators, Job

    job = Job(
        add_arguments=upstream.GPT_JOB.add_arguments,
        validate_arguments=refuse_tolerance,
        build_model=lambda *args: "our model",
        build_data=lambda args, *samples: DataIterators(*(f"our {n}" for n in samples)),
        forward_step=lambda iterator, model: "our step",
        forward_backward_func=lambda args: "our schedule" if args.distca else None,
    )
    megatron.command_line = list(command_line)
    if megatron.script_parses:
        pretrain = upstream.with_distca(megatron.pretrain_019, job)
        megatron.parse()
        pretrain(Container(), theirs("data"), "model type", theirs("step"))
    else:
        pretrain = upstream.with_distca(megatron.pretrain_017, job)
        pretrain(theirs("data"), theirs("model"), "model type", theirs("step"))
    return megatron


def own_documents(args: Namespace, split: str) -> None:
    """As a user's module defines it."""


def test_own_documents_are_given_by_the_function_s_name(megatron) -> None:
    from megatron_patches import upstream

    upstream.with_distca(megatron.pretrain_017, documents=own_documents)
    parser = megatron.modules[".arguments"].__dict__["add_megatron_arguments"](ArgumentParser())
    name = f"{__name__}:own_documents"
    assert parser.parse_args([]).distca_documents == name
    other = ["--distca-documents", "other:function"]
    assert parser.parse_args(other).distca_documents == "other:function"
    with pytest.raises(ValueError, match="give a function that a module defines by name"):
        upstream.with_distca(megatron.pretrain_017, documents=lambda args, split: None)


def test_without_the_flag_megatron_is_untouched(megatron, gone_on_from) -> None:
    run(megatron)
    assert gone_on_from == []
    model = "their configured model" if megatron.script_parses else "Megatron's model"
    assert megatron.called == ["Megatron's data", model, "Megatron's step", "Megatron's schedule"]
    assert megatron.args.dataloader_type == "single"
    assert not megatron.args.calculate_per_token_loss
    assert set(megatron.logged) == {"lm loss"}
    assert megatron.evaluates_as_sft
    assert megatron.order == ["built"]


def test_whole_validation_sets_are_ours_to_count_and_to_repeat(megatron) -> None:
    from megatron_patches.batches.validation_sets import WholeSet

    given = WholeSet(iter(()), 7)  # type: ignore[arg-type]
    training = megatron.modules[".training"].__dict__
    for flags, counted in ((["--distca"], [7]), ([], 3)):
        run(megatron, *flags)
        vars(megatron.args).update(full_validation=True, eval_iters=3)
        # Megatron-LM wraps iterators, and those of whole sets first in a generator.
        wrapped = types.SimpleNamespace(iterable=given)
        assert training["evaluate_and_print_results"]("at", None, wrapped) == counted
    assert training["cyclic_iter"](given) is given
    assert next(training["cyclic_iter"]("theirs")) == "theirs"


def test_with_the_flag_ours_is_called(megatron, gone_on_from) -> None:
    run(megatron, "--distca", "--distca-tolerance", "0.2", "--their-flag", "3")
    assert gone_on_from == [{"consumed_train_samples": 0}]
    assert megatron.called == ["our data", "our model", "our step", "our schedule"]
    assert megatron.args.distca_tolerance == 0.2
    assert megatron.args.their_flag == 3
    assert megatron.args.dataloader_type == "external"
    assert megatron.args.calculate_per_token_loss
    # The mean of an evaluation is over tokens, not ranks; after it the flag is as given.
    assert not megatron.evaluates_as_sft
    assert megatron.args.sft
    # 4 samples of 10 tokens, in a step of less than a second.
    assert megatron.logged["tokens/s"] > 40
    # What flags name was tried first, with the vocabulary of Megatron-LM's tokenizer.
    assert megatron.order == [99, "built"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--distca-tolerance", "2"], "error: too tolerant"),
        (["--distca-servers", "dedicated:2"], "needs --training-loop lean"),
        (["--tensorboard-dir", "/proc/x"], "--tensorboard-dir /proc/x cannot be written to"),
        (["--their-flag", "13"], "error: Megatron-LM refuses the flags: raise AssertionError"),
    ],
)
def test_bad_flags_end_the_run_with_a_line(megatron, flags, message, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        run(megatron, "--distca", *flags)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--distca-tolerence", "2"], "no --distca-tolerence: did you mean --distca-tolerance?"),
        (["--their-flag", "many"], "argument --their-flag: invalid int value"),
    ],
)
def test_a_command_line_that_cannot_be_parsed_takes_a_line(
    megatron, flags, message, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit) as ended:
            run(megatron, "--distca", *flags)
        assert ended.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == (rank == 0)
        assert all(message in line for line in lines)


def test_bad_flags_of_ours_do_not_stop_megatron_without_distca(megatron) -> None:
    run(megatron, "--distca-tolerance", "2")
    assert megatron.called[0] == "Megatron's data"


def test_lines_after_parsing_are_refused(monkeypatch) -> None:
    from megatron_patches.upstream import with_distca

    megatron = MegatronTraining(monkeypatch, script_parses=True)
    megatron.command_line = []
    megatron.parse()
    pretrain = with_distca(megatron.pretrain_019)
    with pytest.raises(ValueError, match="put the two lines after the imports"):
        pretrain(Container(), theirs("data"), "model type", theirs("step"))


def test_an_unknown_pretrain_is_refused() -> None:
    from megatron_patches.upstream import with_distca

    with pytest.raises(ValueError, match="no parameter model_provider, forward_step_func"):
        with_distca(lambda train_valid_test_dataset_provider: None)


@pytest.mark.parametrize(
    ("flags", "error"), [(["--distca"], SystemExit), ([], ValueError)], ids=["distca", "plain"]
)
def test_a_failure_ends_the_rank_with_distca_alone(
    megatron, flags, error, monkeypatch, capsys
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no such corpus")

    monkeypatch.setattr(megatron, "run", fail)
    with pytest.raises(error):
        run(megatron, *flags)
    assert ("error: no such corpus" in capsys.readouterr().err) == bool(flags)
