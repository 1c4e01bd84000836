"""Tables of Megatron-LM's flags that are refused by name, in all supported versions.

Names are as on the command line, without the leading dashes. Megatron-LM's own code, which runs as
it is, follows all other flags. `megatron_patches/flags/followed.py` lists those with reasons: a
flag of a new version is read about before it is followed.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Refused:
    """Flags that are refused for one reason.

    Attributes:
        what: what they ask for that is not covered.
        names: their names. `=a|b` after a name lists values that are accepted; `--another-flag`
            among them stands for the value of another flag.
        instead: what to do beside removing them.
    """

    what: str
    names: str
    instead: str = ""

    def flags(self) -> Iterator[tuple[str, list[str]]]:
        """Iterates over the names and their accepted values."""
        for each in self.names.split():
            name, _, values = each.partition("=")
            yield name, values.split("|")


# With --distca or without: our data, model or loss would pass over them.
LAYERS_OF_SEVERAL_KINDS = Refused(
    "layers of several kinds",
    """
        hybrid-layer-pattern hybrid-override-pattern heterogeneous-layers-config-path
        heterogeneous-layers-config-encoded-json
    """,
)
"""Flags that may name a file, which Megatron-LM reads before `REFUSED` is looked at."""

REFUSED = (
    Refused(
        "made-up data, or phases",
        "mock-data phase-transition-iterations",
        "give files (`distca prepare` makes them)",
    ),
    Refused(
        "other orders of data than one shuffled pass after the other",
        "dataloader-type=external|single",
        "give single, which they are",
    ),
    Refused(
        "data that fill in the middle",
        "fim-data",
        "change the documents before they are prepared",
    ),
    Refused(
        "other micro-batches for evaluation",
        "eval-micro-batch-size=--micro-batch-size",
        "--eval-global-batch-size may differ",
    ),
    Refused("experts made of a dense model's layers", "moe-use-upcycling"),
    Refused(
        "experimental attention variants",
        "experimental-attention-variant linear-attention-freq",
    ),
    LAYERS_OF_SEVERAL_KINDS,
    Refused(
        "other layers than those of the two specs",
        """
            yaml-cfg use-legacy-models qk-l2-norm use-kitchen-attention use-te-activation-func
            use-transformer-engine-op-fuser use-grouped-gemm-for-dense-mlp mla-down-proj-fusion
        """,
        "--spec may name layers of your own",
    ),
    Refused(
        "layers for inference",
        "transformer-impl=local|transformer_engine cache-mla-latents",
        "--transformer-impl local and transformer_engine train",
    ),
    Refused(
        "reinforcement learning",
        "perform-rl-step",
        "a trainer of your own can call our core attention (docs/own_loop.md)",
    ),
    Refused("distillation", "logits-save-dir logits-load-dir"),
    Refused("models of Model Optimizer", "modelopt-enabled"),
    Refused("frozen layers", "freeze-all-layers"),
    Refused(
        "checks that Megatron-LM's own loss makes",
        "check-for-spiky-loss",
        "--check-for-large-grads checks gradients",
    ),
    Refused(
        "steps that are run twice to compare them",
        "rerun-mode=validate_results|disabled",
        "give validate_results, which runs those twice that fail",
    ),
    Refused("errors in the results of Megatron-LM's own checks", "error-injection-rate"),
)

# Where core attention is ours: with --distca, and in plain runs with the local layer spec.
REFUSED_BY_OUR_ATTENTION = (
    Refused(
        "the largest attention logits",
        "qk-clip log-max-attention-logit",
        "--qk-layernorm bounds them",
    ),
    Refused("the choice of attention's kernel", "flash-attention-version batch-invariant-mode"),
    Refused("determinism of attention's backward kernel", "deterministic-mode"),
)

# With --distca.
REFUSED_WITH_DISTCA = (
    Refused(
        "context parallelism, which it replaces",
        "context-parallel-size=1 hybrid-context-parallel",
        "since long documents span the data-parallel ranks",
    ),
    Refused(
        "CUDA graphs of core attention",
        "enable-cuda-graph external-cuda-graph cuda-graph-impl=none",
        "--distca-cuda-graphs is for what surrounds it",
    ),
    Refused("CUDA graphs of the optimizer", "optimizer-cuda-graph"),
    Refused(
        "Megatron's own attention, which it replaces",
        "attention-backend=auto|flash",
        "auto chooses the kernel of the device",
    ),
    Refused(
        "pipeline stages of different numbers of layers, which must call core attention together",
        """
            pipeline-model-parallel-layout decoder-first-pipeline-num-layers
            decoder-last-pipeline-num-layers account-for-embedding-in-pipeline-split
            account-for-loss-in-pipeline-split
        """,
        "choose pipeline sizes that divide --num-layers",
    ),
    Refused(
        "weights that are gathered for each layer",
        """
            tensor-parallel-num-weight-shards=1 expert-tensor-parallel-num-weight-shards=1
            use-megatron-fsdp use-torch-fsdp2
        """,
        "use --use-distributed-optimizer",
    ),
    Refused(
        "offloading of activations",
        "cpu-offloading-num-layers fine-grained-activation-offloading",
        "use --recompute-granularity",
    ),
    Refused(
        "tokens that experts drop, which depend on the rank that has them",
        "moe-expert-capacity-factor",
        "balance the experts, which then take all tokens, by --moe-router-enable-expert-bias or "
        "--moe-aux-loss-coeff",
    ),
    Refused(
        "Megatron's overlap of experts' exchanges, which orders layers by itself",
        """
            overlap-moe-expert-parallel-comm overlap-dispatch-backward-with-experts-wgrad
            ep-overlap-early-attn-memory-release
        """,
    ),
    Refused(
        "weight gradients apart from the backward pass",
        "delay-wgrad-compute",
    ),
    Refused(
        "recordings of layers, which run twice in a micro-batch",
        "save-dgrads-interval save-activations-interval",
        "--save-wgrads-interval records the gradients of weights",
    ),
    Refused(
        "restarts within processes",
        "inprocess-restart",
        "let the scheduler start the job again with --load: all ranks end when one fails",
    ),
    Refused(
        "processes that exchange nothing",
        "fake-process-group",
        "`distca simulate` predicts a job's memory and times on one machine",
    ),
    Refused("groups of processes that are made later", "lazy-mpu-init"),
)

# Attributes that Megatron-LM makes of a flag, where they are named otherwise.
_ATTRIBUTES = {
    "tensor-parallel-num-weight-shards": "gtp_weight_remat_size",
    "expert-tensor-parallel-num-weight-shards": "expert_gtp_weight_remat_size",
}


def refuse(groups: Sequence[Refused], args: Namespace) -> None:
    """Refuses flags of some groups.

    Raises:
        ValueError: one was given; the message says what to do.
    """
    for group in groups:
        for name, accepted in group.flags():
            value = _value(args, name)
            if not value or value in [
                _value(args, each[2:]) if each.startswith("--") else each for each in accepted
            ]:
                continue
            raise ValueError(refusal(group, f"--{name}" + ("" if value == "True" else f" {value}")))


def refusal(group: Refused, given: str) -> str:
    """Returns the message that refuses a flag of a group, as given."""
    instead = group.instead and f", {group.instead}"
    return f"DistCA does not cover {group.what}: remove {given}{instead}"


def _value(args: Namespace, name: str) -> str:
    """Returns the value of a flag as given; empty where it is off."""
    value = vars(args).get(_ATTRIBUTES.get(name, name.replace("-", "_")))
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return str(getattr(value, "name", value)) if value else ""
