"""Inference: one engine, whose ranks share long prompts by any strategy.

    llm = LLM(configure(read_model(FOLDER, torch.float32)))
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8))

A request meets seven files, in this order:

* `llm.py`: `LLM.generate` makes requests, and runs iterations until all are answered;
* `engine.py`: `Engine.add`, `schedule`, `finish`: what has arrived, what is fed, what is answered;
* `distca/schedule/serving/scheduler.py`: which requests' tokens an iteration feeds, and
  which blocks they get. Here a request waits, runs and is aborted;
* `worker.py`: a process's iterations, in the order of their numbers;
* `distca/schedule/serving/iteration.py`: the plans of an iteration, by the strategy. The rank that
  owns a block computes its tokens, and the plans say which rank computes attention;
* `model_runner.py`: a rank's blocks, and the layers of the model over its tokens. A rank without
  tokens takes part in attention alone;
* `attention_runner.py`: keys and values are written to the pool, and core attention runs by the
  plans. In each layer a `LayerWatch` is called twice: `begins` before the layer's rows are written,
  `written` when they are in the pool. Prefill ranks send them then. From here on it is the
  runtime's: `distca/runtime/serving`.

With what these call, a request passes 50 files of `distca` on one rank on CPUs, and 54 on two.
Inference's own are 22 of the 50: they lie here, in `distca/schedule/serving` and in
`distca/runtime/serving`. The other 28 are of plans, costs, the runtime, transports and kernels;
training uses most of them, too.

Where is what:

* A request is admitted by `Scheduler.schedule` (`distca/schedule/serving/scheduler.py`), in its
  second loop. `Scheduler._look_up` gives the request its cached blocks. Its prefill starts at the
  first token after them.
* A chunk's size is what the iteration has left of `max_num_batched_tokens`, in the same method.
  Three things make it smaller: `Scheduler._next_tokens` where groups of ranks grow,
  `HomeShares.most` where ranks have equal shares (`tiles`), and `MOST_SCORED` where the prompt's
  own tokens are scored.
* `Request.blocks` lists a request's blocks and the rank of each. `BlockOwners`
  (`distca/schedule/serving/block_owners.py`) chose the rank. `Scheduler._give_back` frees a block.
* If there are no blocks, `Scheduler._victim` names who is preempted: the youngest of the lowest
  priority. It skips prompts that hold their blocks, so prompts of prefill ranks are never
  preempted.
* The docstring of `distca/schedule/serving/__init__.py` says where a strategy of prefills is added.
* A token is chosen by the rank that owns the last one, in `choose_tokens` (`worker.py`) by
  `SamplingParams.choose` (`sampling.py`). `LLM._run` gathers what all ranks have chosen
  (`processes.py`), and `Engine.finish` ends the iteration with it on all ranks.
* Decode's CUDA graphs begin in `ModelRunner.run`. A model has no graphs if `capture_for`
  (`cuda_graphs.py`) returns None; a step has none if `size_for` does.
* At an abort while vLLM loads a prompt, `PrefillClient.cancel` (`distca/prefill/client.py`) drops
  what still comes. `PrefillRank._free` (`distca/prefill/ranks.py`) gives the ranks' blocks back
  once nothing is written: `distca/schedule/serving/handoff/protocol.py` is the state machine.
* If a rank dies, `RankProcesses._collect` (`rank_processes.py`) reads the end of its pipe, and
  kills the others within seconds. Under torchrun, torchrun does. `step_timeout` is for ranks that
  hang. `distca prefill` starts its ranks again, and vLLM computes the prompts meanwhile.

Three classes describe a request. `AddRequest` (`messages.py`) is what is asked for, and never
changes, so all processes can be given the same. `Request` (`distca/schedule/serving/request.py`) is
how far it is, with its blocks: the scheduler alone changes it, and it knows nothing of sampling.
Workers read both while it runs. `Completion` (`messages.py`) is its answer. `LLM.abort` ends one
early.

`LLM` and `PrefillRank` (`distca/prefill`) have an engine in each process. Engines compute no
plan: each worker makes it from what is fed, so no plan is sent between processes. With a small
model and short prompts, plans take less than 1% of the CPU time, and scheduling 1%
(benchmarks/results/serving/short_prompts.md). An iteration is scheduled when the one before has
ended, since its tokens are known then. Scheduling it earlier would save little time.

Bytes between ranks are counted by the transports (`LLM.bytes_sent`) and by the plans
(`LLM.bytes_planned`). Tests hold the two together.

Others:

* `config.py` is the engine's configuration, and `defaults.py` makes one; `messages.py` has
  requests, what engines and workers say, and answers; `pool_size.py` says how many blocks prompts
  need, `profiled_room.py` how many a GPU has room for;
* `runnable.py` is what the runner needs of a model. `models.py` and `transformers_model.py` load
  those of transformers, `distca/vllm/model.py` those of vLLM;
* `tensor_parallel.py` and `sequence_parallel.py` split weights and rows; `cuda_graphs.py` and
  `step_graphs.py` capture decodes; `transports.py` makes what moves rows; `finite.py` finds where
  values overflow;
* `machine.py` says what strategies are chosen by; `sparse_model.py` and `sparsity_calibration.py`
  measure what may be dropped;
* `conversations.py`, `verify.py` and `rank_processes.py` are for `distca generate`,
  `small_models.py` for `distca verify`.

`distca/simulate/requests` runs the same scheduler, and predicts how long iterations take.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distca.inference.defaults import configure
    from distca.inference.llm import LLM
    from distca.inference.models import read_model
    from distca.inference.sampling import SamplingParams

__all__ = ["LLM", "SamplingParams", "configure", "read_model"]

_MODULES = {
    "LLM": "llm",
    "SamplingParams": "sampling",
    "configure": "defaults",
    "read_model": "models",
}


def __getattr__(name: str) -> object:
    """Imports what is exported when it is first used: most modules here need less than all."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
