"""Documents over three micro-batches against plain Megatron with micro-batches that hold them.

One plain process without `--distca`, with a dense mask, is the reference.
"""

from __future__ import annotations

import pytest

from support.models import StepsDone, train, train_all
from support.parity import RECOMPUTE, WHOLE
from support.pipelines import SIZES, WINDOW, check

CHAIN = 3
# The two chains of a step: one document; one that spans all three and short ones. The next step's.
DOCUMENTS = [2304, 1, 300, 5, 1700, 298, *[128] * 6, 1536, 200, 850, 1254]
PP2 = "--pipeline-model-parallel-size 2"
VIRTUAL = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
# World size, flags of the layout, and of several runs.
LAYOUTS = {
    "DP2": (2, "", [[], RECOMPUTE]),
    "PP2": (2, PP2, [[*RECOMPUTE, WHOLE], ["--distca-max-in-flight", "4"]]),
    "PP2-DP2": (4, PP2, [[], ["--distca-placement", "sequential", WHOLE]]),
    "PP2-VPP2": (2, VIRTUAL, [[], RECOMPUTE]),
    "TP2-SP-PP2": (4, f"{PP2} --tensor-model-parallel-size 2 --sequence-parallel", [[]]),
    "DP1 + 1": (2, "--distca-servers dedicated:1", [[]]),
}


@pytest.fixture(scope="module")
def plain(ranks) -> StepsDone:
    flags = [*SIZES, "--seq-length", str(CHAIN * WINDOW), "--global-batch-size", "2"]
    flags += ["--attention-backend", "unfused"]
    return ranks.run(train, flags, DOCUMENTS, 1, world_size=1)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_gradients_and_bytes(ranks, plain: StepsDone, layout: str) -> None:
    world_size, text, runs = LAYOUTS[layout]
    flags = text.split()
    model_parallel = 2 if "--tensor-model-parallel-size" in flags else 1
    model_parallel *= 2 if "--pipeline-model-parallel-size" in flags else 1
    replicas = (world_size - ("--distca-servers" in flags)) // model_parallel
    flags = [*SIZES, *flags, "--distca", "--distca-chain", str(CHAIN)]
    flags += ["--seq-length", str(WINDOW // replicas)]
    flags += ["--global-batch-size", str(2 * CHAIN * replicas)]
    each = [[*flags, *more] for more in runs]
    results = ranks.run(train_all, each, DOCUMENTS, 1, world_size=world_size)
    for number, more in enumerate(runs):
        check([of_rank[number] for of_rank in results], plain, (layout, more))
