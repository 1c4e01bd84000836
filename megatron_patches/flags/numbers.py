"""Table of the numbers that flags take: those of Megatron-LM's that are followed, and ours.

`check_numbers` refuses a value out of its flag's range before anything else looks at it. Names are
as in `refused`. What depends on several flags is checked in `validation`.
`tests/megatron_patches/flags/test_numbers.py` finds flags that stand in no group, and tries values.
"""

from __future__ import annotations

import ast
import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

from distca.transport.collective import MOST_CTAS


@dataclass(frozen=True)
class Range:
    """Numbers from one to another.

    Attributes:
        least: smallest number.
        most: largest number.
        above: whether `least` itself is left out.
        below: whether `most` itself is left out.
        whole: whether they are whole numbers.
    """

    least: float
    most: float
    above: bool = False
    below: bool = False
    whole: bool = False

    def __contains__(self, value: float) -> bool:
        if self.whole and not isinstance(value, int):
            return False
        # Not a number is neither.
        return (self.least < value or (not self.above and self.least == value)) and (
            value < self.most or (not self.below and self.most == value)
        )

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        least, most = _written(self.least), _written(self.most)
        if self.above:
            return f"{kind} above {least} and at most {most}"
        if self.below:
            return f"{kind} from {least} and below {most}"
        return f"{kind} from {least} to {most}"


def _written(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.8g}"


_INT32 = 2**31 - 1
_LARGEST = 3.4e38
"""Largest float32: optimizers and weights hold no larger number."""
_MANY = 2**40
"""Bound of samples and tokens, whose products fit into int64."""

RANGES = {
    Range(1, _INT32, whole=True): """
        num-layers encoder-num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels
        num-query-groups max-position-embeddings rotary-base rotary-seq-len-interpolation-factor
        make-vocab-size-divisible-by vocab-size padded-vocab-size q-lora-rank kv-lora-rank
        qk-head-dim qk-pos-emb-head-dim v-head-dim mup-base-hidden-size
        micro-batch-size global-batch-size eval-micro-batch-size eval-global-batch-size
        train-iters iterations-to-skip seq-length
        encoder-seq-length eval-interval gpu-sniff-test-interval
        check-weight-hash-across-dp-replicas-interval
        num-experts moe-ffn-hidden-size moe-router-topk moe-router-num-groups
        moe-router-group-topk moe-shared-expert-intermediate-size moe-latent-size
        moe-upcycling-granularity moe-mlp-glu-interleave-size
        moe-shared-expert-glu-interleave-size moe-paged-stash-page-size moe-deepep-num-sms
        moe-flex-dispatcher-num-sms moe-hybridep-num-blocks-permute
        moe-hybridep-num-blocks-unpermute moe-hybridep-num-sms moe-hybridep-num-sms-preprocessing
        moe-routing-trace-max-training-iters save-tokens-per-expert-interval
        tensor-model-parallel-size pipeline-model-parallel-size expert-model-parallel-size
        expert-tensor-parallel-size num-layers-per-virtual-pipeline-stage
        num-virtual-stages-per-pipeline-rank num-distributed-optimizer-instances
        recompute-num-layers mlp-chunks-for-training ddp-bucket-size ddp-num-buckets
        lr-decay-iters lr-wsd-decay-iters muon-num-ns-steps hysteresis
        fp8-amax-history-len fp8-interval
        save-interval save-params-interval save-wgrads-interval save-retain-interval
        non-persistent-save-interval replication-jump replication-factor
        adlr-autoresume-interval log-interval tensorboard-log-interval log-memory-interval
        tensorboard-queue-size distributed-timeout-seconds-after-init
        flight-recorder-trace-buffer-size straggler-minmax-count
        distca-chain distca-pool-size distca-head-parallel-size distca-context-parallel-size
        distca-max-in-flight distca-trace-iterations
        window-attn-skip-freq moe-layer-freq no-rope-freq
        context-parallel-size tensor-parallel-num-weight-shards
        expert-tensor-parallel-num-weight-shards
    """,
    Range(0, _INT32, whole=True): """
        eval-iters start-eval-at-iter exit-interval exit-duration-in-mins train-sync-interval
        manual-gc-interval lr-warmup-iters empty-unused-memory-level wgrad-deferral-limit
        num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 fp8-margin ckpt-step
        override-ckpt-iteration null-tokenizer-eod-id tiktoken-num-special-tokens
        timing-log-level profile-step-start profile-step-end profile-ranks ft-num-warmup-iters
        local-rank fault-injector-num-ranks fault-injector-delay-start-iteration
        fault-injector-seed fault-injector-ranks rampup-batch-size
    """,
    Range(1, _MANY, whole=True): """
        train-samples lr-decay-samples lr-wsd-decay-samples distca-max-document-length
        distca-wide-documents
    """,
    Range(0, _MANY, whole=True): "lr-warmup-samples",
    Range(-1, _INT32, whole=True): "null-tokenizer-pad-id",
    # Megatron-LM adds to it for each rank, and numpy takes 32 bits.
    Range(1, 2**30, whole=True): "seed",
    Range(1, 1_000_000, whole=True): "distributed-timeout-minutes",
    Range(1, 4096, whole=True): "distca-gpus-per-node",
    Range(1, 1024, whole=True): "dist-ckpt-workers mtp-num-layers",
    Range(0, 100, whole=True): "logging-level",
    # Of TCP.
    Range(1, 65_535, whole=True): "straggler-ctrlr-port",
    # Of Linux.
    Range(-20, 19, whole=True): "async-ckpt-cpu-priority",
    Range(0, 7, whole=True): "async-ckpt-io-priority",
    Range(0, 2**62, whole=True): "distca-max-buffer-bytes",
    Range(0, 4096, whole=True): "distca-sm-margin",
    Range(1, MOST_CTAS, whole=True): "distca-nccl-max-ctas",
    Range(0, _LARGEST): """
        lr min-lr decoupled-lr decoupled-min-lr lr-warmup-init weight-decay start-weight-decay
        end-weight-decay clip-grad init-method-std embedding-init-method-std norm-epsilon
        adam-eps moe-aux-loss-coeff moe-z-loss-coeff moe-paged-stash-buffer-size-factor-cpu
        moe-paged-stash-buffer-size-factor-cuda mscale mscale-all-dim fault-injector-fault-delay
        fault-injector-offset-seconds mtp-loss-scaling-factor fault-injector-fault-probabilities
    """,
    Range(0, _LARGEST, above=True): """
        loss-scale initial-loss-scale min-loss-scale rope-scaling-factor rotary-scaling-factor
        activation-func-clamp-value mup-width-mult mup-embedding-mult mup-output-mult
        mup-base-head-dim muon-extra-scale-factor moe-router-topk-scaling-factor
        moe-expert-rank-capacity-factor fault-injector-mtti-seconds distca-node-gb-per-s
        distca-network-gb-per-s distca-server-speeds distca-token-pairs distca-memory-gb
    """,
    Range(-_LARGEST, _LARGEST): "glu-linear-offset mup-attn-scale-power moe-router-force-biased",
    Range(1, float(_INT32)): "loss-scale-window",
    Range(0, 1): """
        attention-dropout hidden-dropout lr-warmup-fraction optimizer-offload-fraction
        moe-router-quantile-balancing-ema moe-router-bias-update-rate
    """,
    Range(0, 1, above=True): "rotary-percent moe-input-jitter-eps",
    Range(0, 1, below=True): """
        adam-beta1 adam-beta2 sgd-momentum muon-momentum lion-beta1 lion-beta2 distca-tolerance
    """,
}
"""Names of flags by what they take; of several values each."""

_RENAMED = {"norm_epsilon": "layernorm_epsilon"}
"""Attributes that flags set, where Megatron-LM renames them only when it has checked them."""
_OF_LAYERS = Range(0, 1, whole=True)
"""Values of a list with one for each layer, where the flag also takes a number."""
_MOST_LAYERS = 65_536
"""Bound of a list with a value for each layer."""
_MAY_LIST = ("window-attn-skip-freq", "moe-layer-freq", "no-rope-freq")


@cache
def ranges() -> dict[str, Range]:
    """Returns the range of each flag by its name."""
    return {name: each for each, names in RANGES.items() for name in names.split()}


def check_numbers(args: Namespace) -> None:
    """Checks the numbers of a command line.

    Args:
        args: parsed arguments, before anything is derived from them.

    Raises:
        ValueError: one is out of range; the message names its flag and the range.
    """
    flags = vars(args)
    for name, allowed in ranges().items():
        attribute = name.replace("-", "_")
        given = flags.get(_RENAMED.get(attribute, attribute), flags.get(attribute))
        values = given if isinstance(given, list | tuple) else [given]
        if values is given and name in _MAY_LIST:
            allowed = _OF_LAYERS
        for value in values:
            if isinstance(value, int | float) and value not in allowed:
                raise ValueError(f"--{name} {value} is out of range: give {allowed}")


def _size(node: ast.expr) -> int:
    """Returns the number of items of a list such as `[0]+[1]*3`, or a whole number in it.

    Megatron-LM evaluates such lists, also those that no memory holds.

    Raises:
        ArgumentTypeError: a list has more items, or a number is larger, than any model has layers.
    """
    match node:
        case ast.Constant(value=int(number)):
            size: float = number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            size = len(items)
            for each in items:
                _size(each)
        case ast.BinOp(left, ast.Add(), right):
            size = _size(left) + _size(right)
        case ast.BinOp(left, ast.Mult(), right):
            size = _size(left) * _size(right)
        case ast.BinOp(left, ast.Pow(), right):
            # Both are small: what is larger than the bound need not be computed.
            base, exponent = _size(left), _size(right)
            size = base**exponent if exponent <= _MOST_LAYERS.bit_length() or base < 2 else math.inf
        case _:
            # Megatron-LM refuses it.
            size = 0
    if size > _MOST_LAYERS:
        raise ArgumentTypeError(f"a list or number in it is larger than {_MOST_LAYERS:,}")
    return int(size)


def refuse_what_cannot_be_read(parser: ArgumentParser) -> None:
    """Makes a parser refuse each value that it cannot read.

    Some of Megatron-LM's types evaluate an expression, whose errors the parser does not expect.
    """
    for action in parser._actions:
        if callable(action.type) and action.type not in (int, float, str):
            action.type = _of_lines(action.type)


_UNREADABLE = ArithmeticError, AssertionError, LookupError, MemoryError, RecursionError, SyntaxError


def _of_lines(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    @wraps(kind)
    def read(text: str) -> Any:
        try:
            if "[" in text:
                _size(ast.parse(text, mode="eval").body)
            return kind(text)
        except (ArgumentTypeError, ValueError, TypeError):
            raise
        except _UNREADABLE as error:
            raise ArgumentTypeError(f"{text!r} cannot be read") from error

    return read
