"""The forward and backward passes of a global batch in ticks: paper, Section 4.1 and Figure 8.

A drop-in for what megatron-core's `get_forward_backward_func` returns, with or without a pipeline.
In every tick each rank runs its stage's micro-batch, if it has one, and computes what the tick's
plan gives it as an attention server. A rank without a micro-batch only serves. At the end of a tick
stages pass on what they made. All else is megatron-core's: the steps, the messages between stages,
gradient synchronisation and finalisation, loss scaling.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, get_model_type

from distca.runtime import Exchange, fill_slots
from distca.schedule import Phase, Work
from megatron_patches.attention import DisaggregatedCoreAttention
from megatron_patches.batch import MicroBatch
from megatron_patches.serving import serve_tick
from megatron_patches.tick_batches import TickBatches, TickInput
from megatron_patches.tracing import Tracing


def forward_backward_func(args: Namespace) -> TickPipeline | None:
    """What runs global batches with `--distca`; None without: megatron-core's own schedules."""
    if not args.distca:
        return None
    if args.distca_trace is None:
        return TickPipeline()
    return TickPipeline(Tracing(args.distca_trace, *args.distca_trace_iterations))


class TickPipeline:
    """Runs global batches in ticks; called like Megatron's forward-backward functions.

    Args:
        tracing: when to record a timeline, and where to.
    """

    def __init__(self, tracing: Tracing | None = None) -> None:
        self._tracing = tracing
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
        """See megatron-core's `get_forward_backward_func`.

        The tokens of a message are read off the plan, not from `seq_length`, `micro_batch_size` and
        `decoder_seq_length`.

        Args:
            data_iterator: the split's `TickStream`; of a list for several model chunks the first,
                which has the ticks of all.

        Returns:
            What the loss function reports of each micro-batch, on the last stage.

        Raises:
            ValueError: the ticks are of another number of micro-batches, or message shapes are to
                be adjusted.
        """
        if adjust_tensor_shapes_fn is not None:
            raise ValueError("--distca cannot adjust the shapes of messages between stages")
        chunks = model if isinstance(model, list) else [model]
        ticks = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        # Megatron-LM wraps iterators in one that can repeat what it gave.
        stream: Any = getattr(ticks, "iterable", ticks)
        batches: TickBatches = stream.batches
        if pg_collection is None:
            pg_collection = _process_groups()
        config = get_model_config(chunks[0])
        self._connect(pg_collection.pp, chunks[0])
        p2p = p2p_communicator or P2PCommunicator(pg_collection.pp, config)
        batch = _GlobalBatch(
            chunks,
            config,
            ticks,
            batches,
            num_microbatches,
            p2p,
            pg_collection,
            lambda data, chunk, input_tensor, stored, **how: schedules.forward_step(
                forward_step_func,
                data,
                chunks[chunk],
                num_microbatches,
                input_tensor,
                stored,
                config,
                cp_group_size=pg_collection.cp.size(),
                collect_non_loss_data=collect_non_loss_data,
                **how,
            ),
            forward_only,
            first_val_step,
        )
        trace = batches.core_attention.trace
        recorded = self._tracing is not None and self._tracing.starts(trace, forward_only)
        if batches.announce is not None:
            batches.announce()
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(
                barrier=config.barrier_with_L1_time
            )
        # Before the optimizer steps: gradients of a failed exchange are not-a-number, or wrong.
        with batches.core_attention.transport.checked():
            batch.run()
            if not forward_only:
                batch.finalize(force_all_reduce)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        if recorded:
            assert self._tracing is not None
            self._tracing.ends(trace, batches.layout)
        return batch.reports

    def _connect(self, stages: torch.distributed.ProcessGroup, chunk: Any) -> None:
        """Lets the stages meet, once: in a tick only some of them pass something on.

        NCCL makes a group's communicator at its first call, which must then be every rank's.
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
    return groups


class _GradientSync:
    """Holds back the reduction of gradients until a chunk's last backward pass.

    With a `grad_sync_func` only the first stage reduces during that pass, as in Megatron's own
    schedules: it ends last. The others have time afterwards.

    Args:
        chunks: this rank's model chunks.
        config: Megatron's, with `no_sync_func` and `grad_sync_func`.
        first_stage: whether they are the first pipeline stage's.
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
        """From here on gradients only add up."""
        self.let_go()
        for no_sync in self._no_sync:
            self._held.enter_context(no_sync())

    def let_go(self) -> None:
        """From here on gradients are reduced as they come."""
        self._held.close()

    @contextlib.contextmanager
    def backward(self, last_of_chunk: bool) -> Iterator[None]:
        """A backward pass, the last one of which reduces the chunk's gradients."""
        now = last_of_chunk and not self._launch
        if now:
            self.let_go()
        yield
        if now:
            self.hold()

    def finish(self) -> None:
        """Launches reductions that wait for it."""
        self.let_go()
        for launch, chunk in zip(self._launch, self._chunks, strict=False):
            launch(chunk.parameters())


class _GlobalBatch:
    """The ticks of one global batch on one rank.

    Attributes:
        reports: what the loss function reported of each micro-batch.
    """

    def __init__(
        self,
        chunks: list[Any],
        config: Any,
        ticks: Iterator[TickInput],
        batches: TickBatches,
        micro_batches: int,
        p2p: P2PCommunicator,
        groups: Any,
        forward_step: Callable[..., Any],
        forward_only: bool,
        first_val_step: bool | None,
    ) -> None:
        self.reports: list[Any] = []
        self._chunks, self._config, self._ticks = chunks, config, ticks
        self._micro_batches = micro_batches
        self._p2p, self._groups = p2p, groups
        self._forward_step = forward_step
        self._forward_only, self._first_val_step = forward_only, first_val_step
        self._made, self._layout = batches, batches.layout
        self._same_ticks = batches.layout.stages == 1 and not batches.layout.dedicated
        assert batches.layout.stage is not None, "dedicated servers hold no model"
        self._stage = batches.layout.stage
        own_stage = batches.layout.servers[self._stage].tolist()
        self._column = own_stage.index(batches.layout.server)
        self._trace = batches.core_attention.trace
        # Of passes whose input has come, whose backward is to come, whose gradient has come.
        self._inputs: dict[Work, torch.Tensor | None] = {}
        self._waiting: dict[Work, tuple[Any, torch.Tensor, MicroBatch]] = {}
        self._gradients: dict[Work, torch.Tensor | None] = {}
        # Backward passes of each chunk that are still to come.
        self._left = [micro_batches] * len(chunks)
        parameter = next(chunks[0].parameters())
        self._tokens = torch.zeros([], dtype=torch.int, device=parameter.device)
        self._activation = torch.empty(0, dtype=config.params_dtype, device=parameter.device)
        self._embedding = None
        self._sync: _GradientSync | None = None

    def run(self) -> None:
        """All ticks."""
        if not self._forward_only:
            self._start_training()
        first = next(self._ticks)
        schedule = first.schedule
        if schedule.micro_batches != self._micro_batches:
            raise ValueError(
                f"the data come in global batches of {schedule.micro_batches} micro-batches, but "
                f"the loop asks for {self._micro_batches}"
            )
        for number in range(len(schedule.ticks)):
            current = self._made.placed(next(self._ticks) if number else first)
            self._trace.labels = {"tick": number} | self._label(current)
            with self._trace.span(self._title(current), "ticks"):
                made = self._compute(current)
            with self._trace.span("pass on", "pipeline"):
                self._pass_on(current, made)
        self._trace.labels = {}

    def _label(self, current: TickInput) -> dict[str, Any]:
        """What the trace says of a tick."""
        if not self._trace.recording:
            return {}
        work, plans, server = current.tick.work, current.plans, self._layout.server
        served = [plan.tasks[plan.tasks.server == server] for plan in plans]
        return {
            "phase": current.tick.phase,
            "server": server,
            "runs": [None if each is None else each._asdict() for each in work],
            "tasks": sum(len(tasks) for tasks in served),
            "pairs": sum(int(tasks.pairs(plans[0].mask).sum()) for tasks in served),
            "own_tokens": sum(int(plan.own_tokens_per_rank()[server]) for plan in plans),
            "bytes_sent": current.bytes_sent,
        }

    def _title(self, current: TickInput) -> str:
        work = current.tick.work[self._stage]
        if work is None:
            return f"{current.tick.phase}: serve"
        title = f"{current.tick.phase}: micro-batch {work.micro_batch}"
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

    def _compute(self, current: TickInput) -> torch.Tensor | None:
        """This stage's part of a tick: what is to be passed on."""
        work = current.tick.work[self._stage]
        if work is None:
            self._serve(current)
            return None
        if current.tick.phase == "forward":
            return self._forward(work, current)
        return self._backward(work, current)

    def _serve(self, current: TickInput) -> None:
        """Takes part in every call of core attention that the working stages make."""
        modules = core_attention_modules(self._chunks[0])
        serve_tick(
            self._made,
            current,
            [module.layer_number for module in modules],
            modules[0].softmax_scale,
            self._activation,
        )

    def _forward(self, work: Work, current: TickInput) -> torch.Tensor:
        assert current.micro_batch is not None
        give_exchanges(current.micro_batch, current.exchanges, self._same_ticks)
        first_work = work.micro_batch == 0
        virtual = len(self._chunks) > 1
        input_tensor = self._inputs.pop(work, None)
        output, tokens = self._forward_step(
            iter([current.micro_batch]),
            work.chunk,
            input_tensor,
            self.reports,
            is_first_microbatch=schedules.check_first_val_step(
                self._first_val_step, self._forward_only, first_work
            ),
            current_microbatch=work.micro_batch,
            vp_stage=work.chunk if virtual else None,
            is_last_stage=self._is_last(work, self._stage),
        )
        self._tokens += tokens
        if not self._forward_only:
            self._waiting[work] = (input_tensor, output, current.micro_batch)
        return output  # type: ignore[no-any-return]

    def _backward(self, work: Work, current: TickInput) -> torch.Tensor | None:
        input_tensor, output, micro_batch = self._waiting.pop(work)
        give_exchanges(micro_batch, current.exchanges, self._same_ticks)
        self._left[work.chunk] -= 1
        assert self._sync is not None
        with self._sync.backward(last_of_chunk=self._left[work.chunk] == 0):
            return schedules.backward_step(  # type: ignore[no-any-return]
                input_tensor,
                output,
                self._gradients.pop(work, None),
                get_model_type(self._chunks[work.chunk]),
                self._config,
            )

    def _is_first(self, work: Work, stage: int) -> bool:
        return stage == 0 and work.chunk == 0

    def _is_last(self, work: Work, stage: int) -> bool:
        return stage == self._layout.stages - 1 and work.chunk == self._layout.chunks - 1

    def _pass_on(self, current: TickInput, made: torch.Tensor | None) -> None:
        """Sends what this stage made to the one that needs it, and receives what it needs."""
        stage, stages = self._stage, self._layout.stages
        if stages == 1:
            return
        phase = current.tick.phase
        forward = phase == "forward"
        own = current.tick.work[stage]
        sender = (stage - 1 if forward else stage + 1) % stages
        others = current.tick.work[sender]
        ends = self._is_last if forward else self._is_first
        outgoing = None if own is None or ends(own, stage) else made
        comes = others is not None and not ends(others, sender)
        exchange = (
            self._p2p.send_forward_recv_forward
            if forward
            else self._p2p.send_backward_recv_backward
        )
        if outgoing is None and not comes:
            received = None
        else:
            received = exchange(outgoing, comes, self._shape_from(sender, current))
        if comes:
            assert others is not None
            self._arrived(phase, others, sender, received)
        if forward and outgoing is not None and not self._forward_only:
            schedules.deallocate_output_tensor(made, self._config.deallocate_pipeline_outputs)

    def _arrived(self, phase: Phase, work: Work, sender: int, tensor: torch.Tensor | None) -> None:
        """Files what another stage sent under the pass of this stage that needs it."""
        if phase == "forward":
            next_chunk = sender == self._layout.stages - 1
            self._inputs[Work(work.micro_batch, work.chunk + next_chunk)] = tensor
        else:
            chunk_before = sender == 0
            self._gradients[Work(work.micro_batch, work.chunk - chunk_before)] = tensor

    def _shape_from(self, sender: int, current: TickInput) -> tuple[int, int, int]:
        """The shape of what a stage sends: `[tokens, 1, hidden size]`."""
        server = self._layout.servers[sender, self._column]
        tokens = sum(int(plan.own_tokens_per_rank()[server]) for plan in current.plans)
        if self._config.sequence_parallel:
            tokens //= self._groups.tp.size()
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
            self._groups.tp,
        )
        config.finalize_model_grads_func(
            self._chunks,
            self._tokens if config.calculate_per_token_loss else None,
            pg_collection=self._groups,
            force_all_reduce=force_all_reduce,
        )


def give_exchanges(
    micro_batch: MicroBatch, exchanges: Sequence[Exchange], same_ticks: bool
) -> None:
    """Lets the core attention of a micro-batch's pass use the exchanges of the tick that runs.

    Args:
        micro_batch: whose pass it is.
        exchanges: of each nano-batch.
        same_ticks: see `fill_slots`.
    """
    params = micro_batch.packed_seq_params
    assert params is not None
    slots = []
    for each in params.halves or (params,):
        assert each.slot is not None
        slots.append(each.slot)
    fill_slots(slots, exchanges, same_ticks)


def core_attention_modules(chunk: torch.nn.Module) -> list[DisaggregatedCoreAttention]:
    """The core-attention modules of a model chunk, in the order of its layers."""
    return [module for module in chunk.modules() if isinstance(module, DisaggregatedCoreAttention)]
