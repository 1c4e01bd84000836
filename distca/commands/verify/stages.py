"""The stages of `distca verify`. Each rests on those before it."""

from __future__ import annotations

from distca.commands.verify.answers import check_answers
from distca.commands.verify.cost_model import measure_costs
from distca.commands.verify.environment import check_environment
from distca.commands.verify.kernels import check_kernels
from distca.commands.verify.links import measure_links
from distca.commands.verify.memory import check_memory
from distca.commands.verify.overlap import measure_overlap
from distca.commands.verify.predictions import COSTS
from distca.commands.verify.serving import measure_serving
from distca.commands.verify.stage import SEND, Stage
from distca.commands.verify.training import check_training
from distca.commands.verify.transports import check_transports

_LOOK = "run `distca doctor`"
_NCCL = f"run it with NCCL_DEBUG=INFO and look at its last lines, or {SEND}"

STAGES = (
    Stage("environment", 60, check_environment, _LOOK),
    Stage("links", 120, measure_links, _NCCL),
    Stage("kernels", 240, check_kernels, f"{_LOOK}, and {SEND}"),
    Stage("transports", 240, check_transports, _NCCL),
    Stage("answers", 480, check_answers, SEND),
    Stage("overlap", 120, measure_overlap, _NCCL),
    Stage(COSTS, 240, measure_costs, SEND),
    Stage("memory", 300, check_memory, SEND),
    Stage("serving", 300, measure_serving, SEND),
    Stage("training", 900, check_training, SEND),
)
