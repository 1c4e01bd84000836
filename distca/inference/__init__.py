"""Inference: one engine, whose ranks share long prompts by any strategy.

    llm = LLM(configure(read_model(FOLDER, torch.float32)))
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8))

A request meets seven files, in this order:

* `llm.py`: `LLM.generate` makes requests, and runs iterations until all are answered;
* `engine.py`: `Engine.add`, `schedule`, `finish`: what has arrived, what is fed, what is answered;
* `distca/schedule/serving/scheduler.py`: which tokens of which requests an iteration feeds, and
  which blocks they get. Here a request waits, is admitted, gets a chunk, is preempted if there are
  no blocks, and is aborted;
* `worker.py`: a process's iterations, in the order of their numbers;
* `distca/schedule/serving/iteration.py`: the plans of an iteration, by the strategy (`steps.py`
  there has the strategies, `block_owners.py` says which rank owns a block). The rank that owns a
  block computes its tokens, and the plans say which rank computes attention;
* `model_runner.py`: a rank's blocks, and the layers of the model over its tokens. A rank without
  tokens takes part in attention alone;
* `attention_runner.py`: keys and values are written to the pool, and core attention runs by the
  plans. A `LayerWatch` is called after each layer: prefill ranks send its keys and values then.
  From here on it is the runtime's: `distca/runtime/serving`.

Three classes describe a request. `AddRequest` (`messages.py`) is what is asked for, and never
changes, so all processes can be given the same. `Request` (`distca/schedule/serving/request.py`) is
how far it is: the scheduler alone changes it, and it knows nothing of sampling. Workers are given
both when it begins to run. They keep arrays that say which rank has each of its blocks; plans are
made from these. `Completion` (`outputs.py`) is its answer. `LLM.abort` ends one early.

The rank that owns the last token of a sequence chooses the next (`worker.py`, `sampling.py`), and
`LLM` gathers what all ranks have chosen (`processes.py`) before its engine ends the iteration.
`LLM` has an engine in each process, and so has `PrefillRank` (`distca/prefill`). Engines compute no
plan: each worker makes it from what is fed, so no plan is sent between processes. With a small
model and short prompts, plans take less than 1% of the CPU time, and scheduling 1%
(benchmarks/results/serving/short_prompts.md). An iteration is scheduled when the one before has
ended, since its tokens are known then. Scheduling it earlier would save little time.

If a rank dies, the exchanges of the others fail, after `step_timeout` at the latest, and torchrun
ends them all. The hand-off of keys and values to another engine is a state machine
(`distca/schedule/serving/handoff/protocol.py`), which says what an abort or a death means there.

Bytes between ranks are counted by the transports (`LLM.bytes_sent`) and by the plans
(`LLM.bytes_planned`). Tests hold the two together.

Others:

* `config.py` is the engine's configuration; `messages.py` has what engines and workers say;
  `outputs.py` has answers; `pool_size.py` says how many blocks prompts need, `profiled_room.py` how
  many a GPU has room for;
* `runnable.py` is what the runner needs of a model. `models.py` and `transformers_model.py` load
  those of transformers, `distca/vllm/model.py` those of vLLM;
* `tensor_parallel.py` and `sequence_parallel.py` split weights and rows; `cuda_graphs.py` and
  `step_graphs.py` capture decodes; `transports.py` makes what moves rows; `finite.py` finds where
  values overflow;
* `machine.py` and `measured_chain.py` measure what strategies are chosen by; `sparse_model.py` and
  `sparsity_calibration.py` measure what may be dropped;
* `conversations.py`, `verify.py` and `rank_processes.py` are for `distca generate`,
  `small_models.py` for `distca verify`.

`distca/simulate/requests` runs the same scheduler, and predicts how long iterations take.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distca.inference.llm import LLM, configure
    from distca.inference.models import read_model
    from distca.inference.sampling import SamplingParams

__all__ = ["LLM", "SamplingParams", "configure", "read_model"]

_MODULES = {"LLM": "llm", "SamplingParams": "sampling", "configure": "llm", "read_model": "models"}


def __getattr__(name: str) -> object:
    """Imports what is exported when it is first used: most modules here need less than all."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
