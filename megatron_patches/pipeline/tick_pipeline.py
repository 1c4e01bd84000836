"""The forward and backward passes of a global batch in ticks: paper, Section 4.1 and Figure 8.

`TickPipeline` replaces the function that megatron-core's `get_forward_backward_func` returns, with
or without a pipeline. In every tick each rank runs its stage's micro-batch, if it has one, and
computes what the tick's plans give it as an attention server. A rank without a micro-batch only
serves. At the end of a tick stages pass their outputs on. All else is megatron-core's: forward and
backward steps, messages between stages, gradient synchronisation and finalisation, loss scaling.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from distca.schedule import Pass, Work
from megatron_patches.batches.micro_batch import MicroBatch
from megatron_patches.batches.ticks import PlannedIterator, RankRuntime, TickInput
from megatron_patches.flags.config import DistcaConfig
from megatron_patches.model.core_attention import DisaggregatedCoreAttention
from megatron_patches.pipeline.attention_server import serve_layers, serve_tick
from megatron_patches.pipeline.data_iterators import unwrap
from megatron_patches.pipeline.progress import Progress
from megatron_patches.pipeline.tracing import Tracing


def forward_backward_func(
    config: DistcaConfig, progress: Progress | None = None
) -> TickPipeline | None:
    """Makes what runs global batches with `--distca`; None: megatron-core's own schedules do.

    Args:
        config: our flags.
        progress: notes how far this rank is; None: nobody reads it.
    """
    if not config.enabled:
        return None
    return TickPipeline(None if config.trace is None else Tracing(config.trace), progress)


class TickPipeline:
    """Runs global batches in ticks; called like Megatron's forward-backward functions.

    Args:
        tracing: recorder of a timeline; None: nothing is recorded.
        progress: notes how far this rank is; None: nobody reads it.
    """

    def __init__(self, tracing: Tracing | None = None, progress: Progress | None = None) -> None:
        self._tracing = tracing
        self._progress = progress or Progress()
        self._connected = False

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Iterator[TickInput] | list[Iterator[TickInput]],
        model: torch.nn.Module | list[torch.nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: P2PCommunicator | None = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Runs a global batch: see megatron-core's `get_forward_backward_func`.

        The tokens of a message are read off the plan, not from `seq_length`, `micro_batch_size` and
        `decoder_seq_length`.

        Args:
            data_iterator: `PlannedIterator` of the split; in a list for several model chunks the
                first one, which has the ticks of all.

        Returns:
            Reports of the loss function, one for each micro-batch, on the last stage.

        Raises:
            ValueError: the data have another number of micro-batches, or message shapes are to be
                adjusted.
        """
        if adjust_tensor_shapes_fn is not None:
            raise ValueError("--distca cannot adjust the shapes of messages between stages")
        chunks = model if isinstance(model, list) else [model]
        ticks = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        # The loop may wrap it to repeat values.
        planned: PlannedIterator = unwrap(ticks)
        runtime = planned.runtime
        groups = pg_collection or _process_groups()
        config = get_model_config(chunks[0])
        self._connect(groups.pp, chunks[0])
        p2p = p2p_communicator or P2PCommunicator(groups.pp, _without_waits(config))
        asked = _Passes(
            forward_step_func,
            num_microbatches,
            forward_only,
            first_val_step,
            collect_non_loss_data,
        )
        batch = _GlobalBatch(asked, chunks, config, groups, p2p, runtime, self._progress)
        trace = runtime.core_attention.trace
        recorded = self._tracing is not None and self._tracing.starts(trace, forward_only)
        if planned.announce is not None:
            planned.announce()
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(
                barrier=config.barrier_with_L1_time
            )
        # Checked before the optimizer steps: a failed exchange leaves wrong gradients, or NaN.
        with runtime.core_attention.transport.checked():
            batch.run(ticks)
            if not forward_only:
                self._progress.enter("gradient reduction")
                batch.finalize(force_all_reduce)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        if recorded:
            assert self._tracing is not None
            self._tracing.ends(trace, runtime.layout)
        return batch.reports

    def _connect(self, stages: torch.distributed.ProcessGroup, chunk: Any) -> None:
        """Connects the stages by a collective of all, once.

        NCCL makes a group's communicator at its first call, which every rank must take part in,
        while in a tick only some stages pass something on.
        """
        if not self._connected and stages.size() > 1:
            device = next(chunk.parameters()).device
            torch.distributed.all_reduce(torch.zeros(1, device=device), group=stages)
        self._connected = True


def _process_groups() -> Any:
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=False
    )
    # Over these ranks --moe-router-enable-expert-bias counts the tokens of each expert.
    groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return groups


class _GradientSync:
    """Delays the reduction of gradients until a chunk's last backward pass.

    With a `grad_sync_func` only the first stage reduces during that pass, as in Megatron's own
    schedules, since it ends last. The other stages reduce afterwards.

    Args:
        chunks: model chunks of this rank.
        config: Megatron's configuration, with `no_sync_func` and `grad_sync_func`.
        first_stage: whether this rank is in the first pipeline stage.
    """

    def __init__(self, chunks: list[Any], config: Any, first_stage: bool) -> None:
        self._chunks = chunks
        given = config.no_sync_func
        self._no_sync = given if isinstance(given, list) else [given] if given else []
        given = None if first_stage else config.grad_sync_func
        self._launch = given if isinstance(given, list) else [given] * len(chunks) if given else []
        self._held = contextlib.ExitStack()
        self.hold()

    def hold(self) -> None:
        """Lets gradients only add up from here on."""
        self.let_go()
        for no_sync in self._no_sync:
            self._held.enter_context(no_sync())

    def let_go(self) -> None:
        """Lets gradients be reduced as they come from here on."""
        self._held.close()

    @contextlib.contextmanager
    def backward(self, last_of_chunk: bool) -> Iterator[None]:
        """Surrounds a backward pass; the last one of a chunk reduces its gradients."""
        now = last_of_chunk and not self._launch
        if now:
            self.let_go()
        yield
        if now:
            self.hold()

    def finish(self) -> None:
        """Launches the reductions that were delayed."""
        self.let_go()
        for launch, chunk in zip(self._launch, self._chunks, strict=False):
            launch(chunk.parameters())


@dataclass(frozen=True)
class _Passes:
    """The passes that the loop asks for: see megatron-core's `get_forward_backward_func`.

    Attributes:
        forward_step: the loop's function for the forward pass of a micro-batch.
        micro_batches: number of micro-batches.
        forward_only: whether there are no backward passes.
        first_val_step: whether this is the first batch of an evaluation; None: no evaluation.
        collect_non_loss_data: whether reports are the loss function's results as they are.
    """

    forward_step: Callable[..., Any]
    micro_batches: int
    forward_only: bool
    first_val_step: bool | None
    collect_non_loss_data: bool


class _GlobalBatch:
    """The ticks of one global batch on one rank.

    Args:
        asked: passes that the loop asks for.
        chunks: model chunks of this rank.
        config: Megatron's configuration of the model.
        groups: Megatron's process groups.
        p2p: messages between stages.
        runtime: what this rank runs ticks with.

    Attributes:
        reports: reports of the loss function, one for each micro-batch.
    """

    def __init__(
        self,
        asked: _Passes,
        chunks: list[Any],
        config: Any,
        groups: Any,
        p2p: P2PCommunicator,
        runtime: RankRuntime,
        progress: Progress,
    ) -> None:
        self._progress = progress
        self.reports: list[Any] = []
        self._asked, self._chunks, self._config = asked, chunks, config
        self._process_groups, self._p2p = groups, p2p
        self._runtime, self._layout = runtime, runtime.layout
        assert runtime.layout.stage is not None, "dedicated servers hold no model"
        self._stage = runtime.layout.stage
        own_stage = runtime.layout.servers[self._stage].tolist()
        self._server_of_stage = own_stage.index(runtime.layout.server)
        self._trace = runtime.core_attention.trace
        # Inputs that have arrived, forward passes without their backward, gradients that arrived.
        self._inputs: dict[Work, torch.Tensor | None] = {}
        self._awaiting_backward: dict[Work, tuple[Any, torch.Tensor, MicroBatch]] = {}
        self._gradients: dict[Work, torch.Tensor | None] = {}
        # Micro-batches of the plans, perhaps more than the loop asks for; backward passes of each
        # chunk that are still to come.
        self._micro_batches = asked.micro_batches
        self._backward_passes_left: list[int] = []
        parameter = next(chunks[0].parameters())
        self._tokens = torch.zeros([], dtype=torch.int, device=parameter.device)
        self._activation = torch.empty(0, dtype=config.params_dtype, device=parameter.device)
        self._embedding = None
        self._sync: _GradientSync | None = None

    def run(self, ticks: Iterator[TickInput]) -> None:
        """Runs the ticks that come next."""
        if not self._asked.forward_only:
            self._start_training()
        self._progress.transport = self._runtime.core_attention.transport
        self._progress.enter("the wait for its plan")
        for number, tick_input in enumerate(self._runtime.global_batch(ticks)):
            if tick_input.asked != self._asked.micro_batches:
                raise ValueError(
                    f"the data come in global batches of {tick_input.asked} micro-batches, but the "
                    f"loop asks for {self._asked.micro_batches}"
                )
            if number == 0:
                self._micro_batches = tick_input.schedule.micro_batches
                self._backward_passes_left = [self._micro_batches] * len(self._chunks)
            evaluates = "evaluation, " if self._asked.forward_only else ""
            self._progress.enter(f"{evaluates}{tick_input.tick.direction} pass of tick {number}")
            self._trace.labels = {"tick": number} | self._label(tick_input)
            with self._trace.span(self._title(tick_input), "ticks"):
                output = self._compute(tick_input)
            with self._trace.span("pass on", "pipeline"):
                self._pass_on(tick_input, output)
        self._trace.labels = {}

    def _label(self, tick_input: TickInput) -> dict[str, Any]:
        """Labels of a tick in the timeline."""
        if not self._trace.recording:
            return {}
        work, server = tick_input.tick.work, self._layout.server
        # Of the first layer.
        plans = self._runtime.masks.select(tick_input.plans, 0)
        served = [plan.tasks[plan.tasks.server == server] for plan in plans]
        return {
            "phase": tick_input.tick.direction,
            "server": server,
            "runs": [None if each is None else each._asdict() for each in work],
            "tasks": sum(len(tasks) for tasks in served),
            "pairs": sum(int(tasks.pairs(plans[0].mask).sum()) for tasks in served),
            "own_tokens": sum(int(plan.own_tokens_per_rank()[server]) for plan in plans),
            "bytes_sent": tick_input.bytes_sent,
        }

    def _title(self, tick_input: TickInput) -> str:
        work = tick_input.tick.work[self._stage]
        if work is None:
            return f"{tick_input.tick.direction}: serve"
        title = f"{tick_input.tick.direction}: micro-batch {work.micro_batch}"
        return title if self._layout.chunks == 1 else f"{title} chunk {work.chunk}"

    def _start_training(self) -> None:
        self._sync = _GradientSync(self._chunks, self._config, first_stage=self._stage == 0)
        self._embedding = schedules.clear_embedding_activation_buffer(
            self._config, self._chunks, self._stage == self._layout.stages - 1
        )
        gather = self._config.param_sync_func
        if gather is not None and len(self._chunks) > 1:
            gathers = gather if isinstance(gather, list) else [gather] * len(self._chunks)
            for each, chunk in zip(gathers, self._chunks, strict=True):
                each(chunk.parameters())

    def _compute(self, tick_input: TickInput) -> torch.Tensor | None:
        """Runs this stage's part of a tick, and returns what is to be passed on."""
        work = tick_input.tick.work[self._stage]
        if work is None:
            self._serve(tick_input)
            return None
        if tick_input.tick.direction == "forward":
            return self._forward(work, tick_input)
        return self._backward(work, tick_input)

    def _serve(self, tick_input: TickInput) -> None:
        """Takes part in every call of core attention that the working stages make."""
        serve_tick(self._runtime, tick_input, *self._of_layers())

    def _serve_last_stage(self, micro_batch: MicroBatch) -> None:
        """Takes part in the calls of layers that the last stage alone has, if those are next."""
        params, runtime = micro_batch.packed_seq_params, self._runtime
        if not runtime.masks.of_last_stage or self._stage == self._layout.stages - 1:
            return
        assert params is not None
        assert params.run is not None
        serve_layers(runtime, params.run.cursor, runtime.layers, *self._of_layers())

    def _of_layers(self) -> tuple[list[int], float, torch.Tensor]:
        """Returns what it takes to serve: numbers of a chunk's layers, factor of the scores, and a
        tensor of the activations' type."""
        modules = core_attention_modules(self._chunks[0])
        numbers = [module.layer_number for module in modules[: self._runtime.layers]]
        behind = range(self._config.mtp_num_layers or 0)
        numbers += [self._config.num_layers + 1 + number for number in behind]
        return numbers, modules[0].softmax_scale, self._activation

    def _forward(self, work: Work, tick_input: TickInput) -> torch.Tensor:
        assert tick_input.micro_batch is not None
        begin_pass(tick_input.micro_batch, tick_input)
        asked = self._asked
        input_tensor = self._inputs.pop(work, None)
        output, tokens = schedules.forward_step(
            asked.forward_step,
            iter([tick_input.micro_batch]),
            self._chunks[work.chunk],
            self._micro_batches,
            input_tensor,
            self.reports,
            self._config,
            cp_group_size=self._process_groups.cp.size(),
            collect_non_loss_data=asked.collect_non_loss_data,
            is_first_microbatch=schedules.check_first_val_step(
                asked.first_val_step, asked.forward_only, work.micro_batch == 0
            ),
            current_microbatch=work.micro_batch,
            vp_stage=work.chunk if len(self._chunks) > 1 else None,
            is_last_stage=self._is_last(work, self._stage),
        )
        self._serve_last_stage(tick_input.micro_batch)
        self._tokens += tokens
        if not asked.forward_only:
            self._awaiting_backward[work] = (input_tensor, output, tick_input.micro_batch)
        return output  # type: ignore[no-any-return]

    def _backward(self, work: Work, tick_input: TickInput) -> torch.Tensor | None:
        input_tensor, output, micro_batch = self._awaiting_backward.pop(work)
        begin_pass(micro_batch, tick_input)
        self._serve_last_stage(micro_batch)
        self._backward_passes_left[work.chunk] -= 1
        assert self._sync is not None
        with self._sync.backward(last_of_chunk=self._backward_passes_left[work.chunk] == 0):
            gradient: torch.Tensor | None = schedules.backward_step(
                input_tensor, output, self._gradients.pop(work, None), self._config
            )
            return gradient

    def _is_first(self, work: Work, stage: int) -> bool:
        return stage == 0 and work.chunk == 0

    def _is_last(self, work: Work, stage: int) -> bool:
        return stage == self._layout.stages - 1 and work.chunk == self._layout.chunks - 1

    def _pass_on(self, tick_input: TickInput, output: torch.Tensor | None) -> None:
        """Sends this stage's output to the stage that needs it, and receives this stage's input."""
        stage, stages = self._stage, self._layout.stages
        if stages == 1:
            return
        direction = tick_input.tick.direction
        forward = direction == "forward"
        own = tick_input.tick.work[stage]
        sender = (stage - 1 if forward else stage + 1) % stages
        others = tick_input.tick.work[sender]
        ends = self._is_last if forward else self._is_first
        outgoing = None if own is None or ends(own, stage) else output
        expects_input = others is not None and not ends(others, sender)
        exchange = (
            self._p2p.send_forward_recv_forward
            if forward
            else self._p2p.send_backward_recv_backward
        )
        if outgoing is None and not expects_input:
            received = None
        else:
            received = exchange(outgoing, expects_input, self._shape_from(sender, tick_input))
        if expects_input:
            assert others is not None
            self._arrived(direction, others, sender, received)
        if forward and outgoing is not None and not self._asked.forward_only:
            schedules.deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)

    def _arrived(
        self, direction: Pass, work: Work, sender: int, tensor: torch.Tensor | None
    ) -> None:
        """Files what another stage sent under the pass of this stage that needs it."""
        if direction == "forward":
            next_chunk = sender == self._layout.stages - 1
            self._inputs[Work(work.micro_batch, work.chunk + next_chunk)] = tensor
        else:
            chunk_before = sender == 0
            self._gradients[Work(work.micro_batch, work.chunk - chunk_before)] = tensor

    def _shape_from(self, sender: int, tick_input: TickInput) -> tuple[int, int, int]:
        """Returns the shape of what a stage sends: `[tokens, 1, hidden size]`."""
        server = self._layout.servers[sender, self._server_of_stage]
        # With each mask the tokens are the same.
        plans = self._runtime.masks.select(tick_input.plans, 0)
        tokens = sum(int(plan.own_tokens_per_rank()[server]) for plan in plans)
        if self._runtime.heads is not None:
            tokens //= self._runtime.heads.size
        if self._config.sequence_parallel:
            tokens //= self._process_groups.tp.size()
        return tokens, 1, self._config.hidden_size

    def finalize(self, force_all_reduce: bool | None) -> None:
        """Reduces the gradients as Megatron does at the end of a schedule."""
        assert self._sync is not None
        self._sync.finish()
        config = self._config
        if config.finalize_model_grads_func is None:
            return
        schedules.finish_embedding_wgrad_compute(
            config,
            self._embedding,
            self._stage == self._layout.stages - 1,
            self._process_groups.tp,
        )
        config.finalize_model_grads_func(
            self._chunks,
            self._tokens if config.calculate_per_token_loss else None,
            pg_collection=self._process_groups,
            force_all_reduce=force_all_reduce,
        )


def _without_waits(config: Any) -> Any:
    """Returns a configuration with which no message between stages waits for the whole device.

    Megatron-LM waits so after each, for a fault of older versions of torch.
    """
    config = copy.copy(config)
    config.batch_p2p_sync = False
    return config


def begin_pass(micro_batch: MicroBatch, tick_input: TickInput) -> None:
    """Lets a micro-batch's core attention follow the program of the tick that runs."""
    params = micro_batch.packed_seq_params
    assert params is not None
    assert params.run is not None
    params.run.cursor.begin(tick_input.exchanges, tick_input.program)


def core_attention_modules(chunk: torch.nn.Module) -> list[DisaggregatedCoreAttention]:
    """Returns the core-attention modules of a model chunk, in the order of its layers."""
    return [module for module in chunk.modules() if isinstance(module, DisaggregatedCoreAttention)]
