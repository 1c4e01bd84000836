"""Gradients in Megatron-LM's own loop with `--distca`, against those without.

Checkpoints have the tensors of the whole model, whatever ranks hold them: Adam's first moments
after two steps tell the gradients of the second one.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from support.parity import relative
from support.pretraining import LOSS, run_command, separate
from support.whole_runs import write_documents

WINDOW, MICRO_BATCHES = 512, 2
BETA, MOMENT = 0.9, "optimizer.state.exp_avg."
FLAGS = f"""
    --tokenizer-type NullTokenizer --vocab-size 100
    --make-vocab-size-divisible-by 64 --num-layers 4 --hidden-size 64 --ffn-hidden-size 96
    --num-attention-heads 4 --normalization RMSNorm --swiglu --disable-bias-linear
    --position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0
    --hidden-dropout 0 --micro-batch-size 1 --lr 3e-3 --lr-decay-style constant --weight-decay 0.1
    --train-iters 2 --save-interval 1 --split 100,0,0 --log-interval 1 --eval-iters 0
    --max-position-embeddings {WINDOW} --distca-max-document-length {WINDOW}
""".split()


class OwnLoop:
    """Two steps of Megatron-LM's loop without `--distca` in one process, and runs held against it.

    Args:
        folder: where data and checkpoints are written.
        model: flags of the model, beside `FLAGS`.

    Attributes:
        expected: clipped gradients of the second step, by name.
    """

    def __init__(self, folder: Path, model: list[str]) -> None:
        self._folder, self._model = folder, model
        self._data = write_documents(folder / "documents", [500, 470, 130, 300] * 20)
        self._plain = folder / "plain"
        dense = ["--attention-backend", "unfused", "--save", str(self._plain)]
        self._losses = self._train(1, *sizes(WINDOW), *dense)
        before = moments(self._plain, 1)
        self.expected = {
            name: (after - BETA * before[name]) / (1 - BETA)
            for name, after in moments(self._plain, 2).items()
        }

    def check(self, processes: int, *flags: str) -> None:
        """Holds the second step of a run against that of the plain one, whose first it loads.

        Weights alone: stages of a pipeline would draw others, and ranks that share experts have
        another optimizer.
        """
        begun = self._folder / "begun"
        shutil.rmtree(begun, ignore_errors=True)
        shutil.copytree(self._plain / "iter_0000001", begun / "iter_0000001")
        (begun / "latest_checkpointed_iteration.txt").write_text("1")
        load = ["--load", str(begun), "--save", str(begun), "--no-load-optim", "--no-load-rng"]
        losses = self._train(processes, *flags, *load)
        assert losses == pytest.approx({2: self._losses[2]}, rel=2e-6)
        found = {name: moment / (1 - BETA) for name, moment in moments(begun, 2).items()}
        assert found.keys() == self.expected.keys()
        for name, gradient in found.items():
            assert relative(gradient, self.expected[name]) < 1e-5, name

    def _train(self, processes: int, *flags: str) -> dict[int, float]:
        """Runs some processes, and returns the losses of the iterations."""
        given = [*FLAGS, "--data-path", self._data, *self._model, *flags]
        found = LOSS.findall(run_command(processes, given))
        losses = {int(iteration): float(loss) for iteration, loss in found}
        return separate(losses) if len(losses) > 1 else losses


def sizes(seq_length: int, data_parallel: int = 1, chain: int = 1) -> list[str]:
    """Flags for micro-batches, or chains, of a window each, and the tokens of each rank in them."""
    assert seq_length * data_parallel * chain == WINDOW
    samples = MICRO_BATCHES * data_parallel * chain
    return [
        *("--seq-length", str(seq_length), "--global-batch-size", str(samples)),
        *(["--distca-chain", str(chain)] if chain > 1 else []),
    ]


def moments(checkpoints: Path, iteration: int) -> dict[str, torch.Tensor]:
    """Returns Adam's first moments of a checkpoint, by the parameters' names."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: dict[str, Any] = {}
    reader = FileSystemReader(str(checkpoints / f"iter_{iteration:07d}"))
    _load_state_dict(found, reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return {
        name.removeprefix(MOMENT): moment
        for name, moment in found.items()
        if name.startswith(MOMENT)
    }
