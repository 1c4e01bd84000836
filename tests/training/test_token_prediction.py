"""Multi-token prediction with `--distca` on several processes against plain Megatron on one.

The plain process has a global batch as one micro-batch: Megatron-LM averages the losses of these
layers over a micro-batch, and ours are averaged over the global batch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support import parity
from support.models import StepsDone, train
from support.parity import check_gradients
from support.versions import PREDICTS_TOKENS
from support.whole_runs import RunSeen, whole_run, write_documents

pytestmark = pytest.mark.skipif(not PREDICTS_TOKENS, reason="not covered in this version")

full = pytest.mark.full

# Windows of 512 tokens. A one-token document, two-token ones, one that spans both ranks.
LENGTHS = [1, 200, 2, 2, 150, 157, 512, 400, 112, *[64] * 8] * 2
PLAIN = "--seq-length 512 --micro-batch-size 4 --global-batch-size 4".split()
_REFERENCES: dict[str, StepsDone] = {}


def reference(ranks, model: str) -> StepsDone:
    """Two steps of plain Megatron."""
    if model not in _REFERENCES:
        _REFERENCES[model] = ranks.run(train, [*PLAIN, *model.split()], LENGTHS, 2, world_size=1)[0]
    return _REFERENCES[model]


def check(ranks, model: str, flags: str, world_size: int = 2) -> list[StepsDone]:
    given = [*flags.split(), *model.split(), "--distca"]
    found = ranks.run(train, given, LENGTHS, 2, world_size=world_size)
    expected = reference(ranks, model)
    for rank in found:
        assert rank.bytes_counted == rank.bytes_planned
        if not rank.serves_only:
            assert rank.losses == pytest.approx(expected.losses, rel=3e-6)
            assert rank.grad_norms == pytest.approx(expected.grad_norms, rel=1e-4)
    check_gradients(found, expected, flags)
    return found


ONE, TWO = "--mtp-num-layers 1", "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5"
LATENT = f"""{ONE}
    --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16
    --qk-pos-emb-head-dim 8 --v-head-dim 12 --qk-layernorm
"""
EXPERTS = f"""{TWO}
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-layer-freq [0,1]
    --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none
"""
WINDOWS = f"{TWO} --num-layers 4 --window-size 100,0 --window-attn-skip-freq 2"
HALVES = "--seq-length 256 --global-batch-size 8"
WHOLE = "--seq-length 512 --global-batch-size 4"
WHOLE_NANO = parity.WHOLE
RECOMPUTE = " ".join(parity.RECOMPUTE)
TP2, PP2 = (f"{WHOLE} --{kind}-model-parallel-size 2" for kind in ("tensor", "pipeline"))


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        (ONE, HALVES),
        pytest.param(
            TWO,
            f"{HALVES} --distca-scheduler greedy --distca-backward keep {WHOLE_NANO}",
            marks=full,
        ),
        (f"{TWO} --mtp-use-repeated-layer", HALVES),
        pytest.param(f"{TWO} --mtp-detach-heads", HALVES, marks=full),
        pytest.param(ONE, f"{HALVES} {RECOMPUTE}", marks=full),
        (TWO, "--seq-length 128 --global-batch-size 16 --distca-chain 2"),
        pytest.param(ONE, TP2, marks=full),
        (TWO, f"{TP2} --sequence-parallel"),
        (TWO, PP2),
        (ONE, f"{PP2} {WHOLE_NANO} {RECOMPUTE}"),
        (TWO, f"{HALVES} --distca-head-parallel-size 2"),
        (LATENT, f"{HALVES} --distca-latent-rows on"),
        pytest.param(LATENT, f"{PP2} --no-distca-pool-stages --distca-latent-rows on", marks=full),
        (EXPERTS, f"{HALVES} --expert-model-parallel-size 2"),
        pytest.param(EXPERTS, HALVES, marks=full),
        pytest.param(WINDOWS, HALVES, marks=full),
        (WINDOWS, PP2),
    ],
)
def test_losses_gradients_and_bytes(ranks, model: str, flags: str) -> None:
    check(ranks, model, flags)


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (4, f"{HALVES} --pipeline-model-parallel-size 2"),
        (3, f"{HALVES} --distca-servers dedicated:1"),
        pytest.param(3, f"{PP2} --distca-servers dedicated:1 {WHOLE_NANO}", marks=full),
        (2, f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 4"),
        pytest.param(
            4, f"{HALVES} --pipeline-model-parallel-size 2 --no-distca-pool-stages", marks=full
        ),
    ],
)
def test_pipelines_and_servers(ranks, world_size: int, flags: str) -> None:
    """Stages and servers without these layers compute their attention, too."""
    check(ranks, f"{TWO} --num-layers 4", flags, world_size)


@pytest.mark.parametrize("flags", [HALVES, PP2])
def test_tied_embeddings_and_a_sharded_optimizer(ranks, flags: str) -> None:
    """In a pipeline the last stage has a copy of the embedding, for the tokens of its layers."""
    sharded, overlap = "--use-distributed-optimizer", "--overlap-grad-reduce --overlap-param-gather"
    for tied in (True, False):
        (expected,) = ranks.run(train, [*PLAIN, *ONE.split()], LENGTHS, 2, tied, world_size=1)
        # In a pipeline Megatron-LM does not overlap the gradients of tied embeddings.
        overlaps = not tied or flags == HALVES
        for more in ("", f"{sharded} {overlap if overlaps else ''}"):
            ours = f"{flags} {ONE} --distca {more}".split()
            found = ranks.run(train, ours, LENGTHS, 2, tied, world_size=2)
            for rank in found:
                assert rank.losses == pytest.approx(expected.losses, rel=3e-6), (tied, more)
                assert rank.grad_norms == pytest.approx(expected.grad_norms, rel=1e-4), (tied, more)
            if not more:
                check_gradients(found, expected, (flags, tied))


def losses_logged(
    flags: list[str], lengths: list[int], weighted: bool
) -> tuple[StepsDone, list[float], list[float]]:
    """A step, and what Megatron-LM would log of it: losses of the layers, and right predictions."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper as logged

    tracker = logged.tracker
    done = train(flags, lengths, 1, weighted=weighted)
    # The end of a run forgets it.
    logged.tracker = tracker
    micro_batches = 1 if "--distca" not in flags else 4
    logged.reduce_metrics_in_tracker()
    return (
        done,
        (tracker["loss_values"] / micro_batches).tolist(),
        tracker["correct_values"].tolist(),
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_documents_that_windows_cut_and_weights(ranks, weighted: bool) -> None:
    """Where a window cuts a document there is nothing to predict; what is logged is a mean, too."""
    lengths = [1, 200, 400, 700, 301, 446] if not weighted else [300, 900, 1, 47, 600, 200]
    plain = [*PLAIN, *TWO.split()]
    (expected, of_plain, right) = ranks.run(losses_logged, plain, lengths, weighted, world_size=1)[
        0
    ]
    found = ranks.run(
        losses_logged, [*HALVES.split(), *TWO.split(), "--distca"], lengths, weighted, world_size=2
    )
    for done, losses, accepted in found:
        assert done.losses == pytest.approx(expected.losses, rel=3e-6)
        assert losses == pytest.approx(of_plain, rel=3e-6)
        assert accepted == right
    check_gradients([done for done, *_ in found], expected, weighted)


def test_a_run_evaluates_saves_and_resumes(ranks, tmp_path: Path) -> None:
    """In Megatron-LM's loop, whose weights depend on the stages."""
    corpus = write_documents(tmp_path / "corpus", [100, 412, 512, 300, 212] * 8)
    given = f"{TWO} --data-path {corpus} --split 60,30,10 --distca-max-document-length 512"
    given += " --log-interval 1 --eval-iters 1 --eval-interval 2 --train-iters 4"

    def run(flags: str, world_size: int) -> RunSeen:
        return ranks.run(whole_run, [*given.split(), *flags.split()], world_size=world_size)[0]

    for more in ("", "--full-validation"):
        plain = run(f"{' '.join(PLAIN)} {more}", 1)
        found = run(f"{HALVES} --distca {more}", 2)
        assert len(plain.losses) == 4
        assert found.losses == pytest.approx(plain.losses, rel=1e-5)
        assert found.norms == pytest.approx(plain.norms, rel=1e-4)
        assert len(found.validation) == len(plain.validation) > 1
        for (_, loss), (_, expected) in zip(found.validation, plain.validation, strict=True):
            assert loss == pytest.approx(expected, rel=1e-5)
    whole, saved = run(f"{PP2} --distca", 2), f"{PP2} --distca --save {tmp_path / 'saved'}"
    first = run(f"{saved} --exit-interval 2", 2)
    rest = run(f"{saved} --load {tmp_path / 'saved'}", 2)
    assert [*first.losses, *rest.losses] == [1, 2, 3, 4]
    assert {**first.losses, **rest.losses} == pytest.approx(whole.losses, rel=1e-6)
