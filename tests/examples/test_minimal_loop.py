"""The example's loop: on two ranks it computes what one rank does, and what plain Megatron does."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from support.parity import relative
from support.pretraining import run_script
from support.ranks import Ranks

WINDOW = 512
LENGTHS = [
    *(1, 300, 5, 1, 205),  # odd ones, one-token ones
    *(100, 412),  # one that spans both ranks
    WINDOW,
    *([128] * 4),
]
CASES = {
    "one rank": (1, []),
    "two ranks": (2, []),
    "two ranks, whole micro-batches": (2, ["--no-distca-ping-pong"]),
    "two ranks, greedy": (2, ["--distca-scheduler", "greedy"]),
}


Seen = tuple[list[float], dict[str, torch.Tensor]]
"""The losses of two steps, and the gradients of the first one."""


def losses_and_gradients(flags: list[str]) -> Seen:
    """Trains two steps of the example on this rank; collective."""
    from examples.minimal_loop import Documents, build_run, parse, train_step

    args = parse(["--hidden-size", "48", "--num-attention-heads", "4", "--lr", "1e-2", *flags])
    run = build_run(args, Documents(np.array(LENGTHS * 8)))
    gradients, step = {}, run.optimizer.step

    def noting_gradients() -> object:
        for name, parameter in run.chunks[0].named_parameters():
            gradients.setdefault(name, parameter.main_grad.clone())
        return step()

    run.optimizer.step = noting_gradients
    losses = [train_step(run)["lm loss"] for _ in range(2)]
    run.data.close()
    return losses, gradients


def run(ranks: Ranks, world_size: int, flags: list[str]) -> list[Seen]:
    """What each rank saw of a run over the same windows, whatever their number."""
    flags = [*flags, "--seq-length", str(WINDOW // world_size)]
    return ranks.run(losses_and_gradients, flags, world_size=world_size)


@pytest.fixture(scope="module")
def plain(ranks: Ranks) -> Seen:
    """What plain Megatron gives, with a dense mask in one process."""
    return run(ranks, 1, ["--plain"])[0]


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_plain_megatron(
    ranks: Ranks, plain: Seen, case: str
) -> None:
    expected, wanted = plain
    for losses, gradients in run(ranks, *CASES[case]):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert losses[1] != losses[0]
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            assert relative(gradient, wanted[name]) < 1e-6, name


def test_the_printed_command_trains() -> None:
    """Two processes that train and one that only serves."""
    flags = "--train-iters 3 --seq-length 1024 --distca-servers dedicated:1".split()
    code, printed = run_script("examples/minimal_loop.py", 3, flags)
    assert code == 0, printed[-3000:]
    losses = re.findall(r"step \d: lm loss ([\d.]+), .*load max/mean [\d.]+, .*norm", printed)
    assert len(losses) == 3
    assert float(losses[-1]) < float(losses[0])
    sent = dict(re.findall(r"server (\d) sent ([\d,]+) bytes", printed))
    assert sent.keys() == {"0", "1", "2"}
    assert all(int(number.replace(",", "")) > 0 for number in sent.values())


@pytest.mark.parametrize(
    "flags", ["--distca-servers dedicated:0", "--plain --distca-servers dedicated:1"]
)
def test_bad_flags_are_refused(flags: str, capsys) -> None:
    from examples.minimal_loop import parse

    with pytest.raises(SystemExit):
        parse(flags.split())
    assert "--distca-servers is inplace or, without --plain, dedicated:N" in capsys.readouterr().err
