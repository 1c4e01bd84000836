"""The two lines in Megatron-LM's `pretrain_gpt.py`, without Megatron-LM.

Its `megatron.training` is in no wheel for this Python: a stand-in with the parameters of its
`pretrain` shows what would be called.
"""

from __future__ import annotations

import sys
import types
from argparse import ArgumentParser, Namespace
from typing import Any

import pytest


class MegatronTraining:
    """What Megatron-LM's `pretrain` does with its arguments, in short."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.args = Namespace()
        module = types.ModuleType("megatron.training")
        module.get_args = lambda: self.args  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "megatron.training", module)
        self.schedules = types.ModuleType("megatron.training.training")
        self.schedules.get_forward_backward_func = lambda: "Megatron's schedule"  # type: ignore
        monkeypatch.setitem(sys.modules, "megatron.training.training", self.schedules)
        self.checkpointing = types.ModuleType("megatron.training.checkpointing")
        self.checkpointing.check_checkpoint_args = lambda saved: None  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "megatron.training.checkpointing", self.checkpointing)
        monkeypatch.setattr("megatron_patches.cpu.adapt_megatron_training", lambda: None)

    def pretrain(
        self,
        train_valid_test_dataset_provider: Any,
        model_provider: Any,
        model_type: Any,
        forward_step_func: Any,
        process_non_loss_data_func: Any = None,
        extra_args_provider: Any = None,
        args_defaults: Any = None,
        store: Any = None,
    ) -> list[Any]:
        parser = ArgumentParser()
        parser.add_argument("--dataloader-type", default="single")
        parser.add_argument("--calculate-per-token-loss", action="store_true")
        parser = extra_args_provider(parser)
        self.args = parser.parse_args(self.command_line)
        self.checkpointing.check_checkpoint_args(Namespace(consumed_train_samples=0))
        self.called = [
            train_valid_test_dataset_provider((1, 2, 3)),
            model_provider(pre_process=True),
            forward_step_func("iterator", "model"),
            self.schedules.get_forward_backward_func(),
        ]
        return self.called

    command_line: list[str]
    called: list[Any]


def theirs(name: str) -> Any:
    return lambda *args, **kwargs: f"Megatron's {name}"


@pytest.fixture
def wrapped(monkeypatch):
    from megatron_patches import upstream
    from megatron_patches.loop.job import DataIterators, Job

    job = Job(
        add_arguments=upstream.GPT_JOB.add_arguments,
        validate_arguments=lambda args: None,
        build_model=lambda *args: "our model",
        build_data=lambda args, *samples: DataIterators(*(f"our {n}" for n in samples)),
        forward_step=lambda iterator, model: "our step",
        forward_backward_func=lambda args: "our schedule" if args.distca else None,
    )
    megatron = MegatronTraining(monkeypatch)
    for method, answer in (
        ("model", lambda self, **kwargs: "our model"),
        ("data_iterators", lambda self, samples: "our data"),
    ):
        monkeypatch.setattr(upstream._Providers, method, answer, raising=False)
    monkeypatch.setattr(upstream._Providers, "__init__", lambda self, job: None)

    def run(*command_line: str, **more: Any) -> Namespace:
        megatron.command_line = list(command_line)
        pretrain = upstream.with_distca(megatron.pretrain, job)
        pretrain(
            theirs("data"),
            theirs("model"),
            "model type",
            theirs("step"),
            args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
            **more,
        )
        return megatron

    return run


@pytest.fixture
def gone_on_from(monkeypatch) -> list[Any]:
    """Arguments of the checkpoints from which our data goes on."""
    from megatron_patches import upstream

    found: list[Any] = []
    monkeypatch.setattr(upstream, "go_on_from", lambda saved, args: found.append(saved))
    return found


def test_without_the_flag_megatron_is_untouched(wrapped, gone_on_from) -> None:
    megatron = wrapped()
    assert gone_on_from == []
    assert megatron.called == [
        f"Megatron's {name}" for name in ("data", "model", "step", "schedule")
    ]
    assert megatron.args.dataloader_type == "single"
    assert not megatron.args.calculate_per_token_loss


def test_with_the_flag_ours_is_called(wrapped, gone_on_from) -> None:
    megatron = wrapped("--distca", "--distca-tolerance", "0.2")
    assert gone_on_from == [{"consumed_train_samples": 0}]
    assert megatron.called == ["our data", "our model", "our step", "our schedule"]
    assert megatron.args.distca_tolerance == 0.2
    assert megatron.args.dataloader_type == "external"
    assert megatron.args.calculate_per_token_loss


def test_other_extra_arguments_are_kept(wrapped) -> None:
    def add_theirs(parser: ArgumentParser) -> ArgumentParser:
        parser.add_argument("--their-flag", type=int)
        return parser

    megatron = wrapped("--distca", "--their-flag", "3", extra_args_provider=add_theirs)
    assert megatron.args.their_flag == 3


def test_an_unknown_pretrain_is_refused() -> None:
    from megatron_patches.upstream import with_distca

    with pytest.raises(ValueError, match="no parameter model_provider, forward_step_func"):
        with_distca(lambda train_valid_test_dataset_provider: None)
