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
* `distca/schedule/serving/iteration.py`: the plans of an iteration, by the strategy. The rank that
  owns a block computes its tokens, and attention is where the plans say;
* `model_runner.py`: a rank's blocks, and the layers of the model over its tokens. A rank without
  tokens takes part in attention alone;
* `attention_runner.py`: keys and values are written to the pool, and core attention runs by the
  plans. A `LayerWatch` hears of each layer, as prefill ranks do to send its rows. From here on it
  is the runtime's: `distca/runtime/serving`.

What stands for a request on this way: `AddRequest` is what is asked for, and never changes, so all
processes can be given the same; `Request` (`distca/schedule/serving/request.py`) is how far it is,
which the scheduler alone changes, and knows nothing of sampling. Workers are given both when it
begins to run, and keep which rank has each of its blocks as arrays, which plans are made of.
`Completion` (`outputs.py`) is its answer.

The rank that owns the last token of a sequence chooses the next (`worker.py`, `sampling.py`), and
`LLM` gathers what all ranks have chosen before its engine ends the iteration. `LLM` has an engine
in each process, and so has `PrefillRank` (`distca/prefill`). Engines compute no plan: each worker
makes it from what is fed, since nothing has to be sent then. With a small model and short prompts,
plans take 1% of the CPU time, and scheduling 2% (benchmarks/results/serving/short_prompts.md). An
iteration is scheduled when the one before has ended: its tokens are known then, and there is little
to hide.

If a rank dies, the exchanges of the others fail, after `step_timeout` at the latest, and torchrun
ends them all. What an abort or a death means for keys and values on their way to another engine is
in `distca/schedule/serving/handoff/protocol.py`.

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
