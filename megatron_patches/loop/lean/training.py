"""The lean loop, which does what Megatron-LM's `pretrain()` does on megatron-core alone.

Schedules, data parallelism, optimizers and checkpoints are megatron-core's; the loop calls them.
"""

from __future__ import annotations

import functools
import logging
import random
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_patches.batches.validation_sets import evaluates, suffixes
from megatron_patches.flags.batch_sizes import init_calculator, samples_of_splits
from megatron_patches.flags.megatron import dedicated_processes, parse_args
from megatron_patches.hooks import adapt_megatron_core
from megatron_patches.loop.ending import ending_the_job_on_failure
from megatron_patches.loop.job import DataIterators, Job
from megatron_patches.loop.lean.termination import TerminationSignal
from megatron_patches.loop.messages import exit_with_message
from megatron_patches.pipeline.dedicated import serve
from megatron_patches.pipeline.processes import Processes

logger = logging.getLogger(__name__)


def pretrain(job: Job, process: LaunchedProcess, argv: Sequence[str] | None = None) -> None:
    """Parses the command line, trains, and ends every process group.

    A rank that fails prints its message and ends at once with a status other than 0, so that the
    launcher ends the others.

    Args:
        job: job to run.
        process: this process, as launched.
        argv: command line; None: this process's.
    """
    from megatron_patches.loop.lean.logs import setup_logging

    setup_logging(process.rank)
    args = _arguments_or_exit(job, argv, process)
    with ending_the_job_on_failure(process.told):
        from megatron_patches.loop.preflight import preflight

        processes = initialize(args, process)
        if processes is not None and processes.serves_only:
            serve(job, args, processes)
        else:
            with preflight(args, process.told):
                _train(build_run(job, args, processes))
        dist.barrier()
        dist.destroy_process_group()


@dataclass(frozen=True)
class LaunchedProcess:
    """A process as its launcher describes it.

    Attributes:
        rank: number of the process among all.
        world_size: number of processes.
        local_rank: number of the process on its machine.
        alone: whether no launcher started the process.
        told: all that the launcher told the process.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    alone: bool = True
    told: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def by_torchrun(told: Mapping[str, str]) -> LaunchedProcess:
        """Reads torchrun's description of this process.

        Args:
            told: environment variables of this process, which are torchrun's interface.
        """
        if "RANK" not in told:
            return LaunchedProcess()
        return LaunchedProcess(
            int(told["RANK"]),
            int(told["WORLD_SIZE"]),
            int(told["LOCAL_RANK"]),
            alone=False,
            told=told,
        )


def _arguments_or_exit(job: Job, argv: Sequence[str] | None, process: LaunchedProcess) -> Namespace:
    try:
        args = parse_args(job.add_arguments, argv, process.world_size)
        job.validate_arguments(args)
    except ValueError as error:
        exit_with_message(str(error), process.rank)
    args.rank = process.rank
    return args


def initialize(args: Namespace, process: LaunchedProcess, store: Any = None) -> Processes | None:
    """Starts process groups and random seeds, on a GPU of its own where there are any.

    Args:
        args: flags.
        process: this process, as launched.
        store: `torch.distributed.Store` in which processes without a launcher meet.

    Returns:
        The processes of a job with dedicated servers; None: there are none.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(process.local_rank)
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    processes = None
    dedicated = dedicated_processes(args)
    if dedicated:
        store, _, _ = next(
            dist.rendezvous("env://", process.rank, process.world_size)  # type: ignore[attr-defined]
        )
        processes = Processes(
            store,
            process.rank,
            args.world_size,
            dedicated,
            args.tensor_model_parallel_size,
            timeout,
        )
        processes.init_default_group(args.distributed_backend)
        if processes.serves_only:
            return processes
    else:
        if store is None and process.alone:
            # A process by itself needs no address to meet others at.
            store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(
            args.distributed_backend,
            rank=process.rank,
            world_size=process.world_size,
            timeout=timeout,
            store=store,
        )
    initialize_megatron(args)
    return processes


def initialize_megatron(args: Namespace) -> None:
    """Sets megatron-core's process-wide state; `torch.distributed` must be initialised."""
    from megatron.core import parallel_state, tensor_parallel

    adapt_megatron_core()
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
    )
    # Seeds of pipeline stages differ and those of data-parallel ranks don't, as in Megatron-LM.
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    init_calculator(args, dist.get_rank())


@dataclass
class Run:
    """The parts of a run.

    Attributes:
        job: job that runs.
        args: flags.
        model: model chunks of this rank, wrapped for data parallelism.
        optimizer: Megatron's optimizer.
        scheduler: schedule of learning rate and weight decay.
        data: iterators of micro-batches, one set for each model chunk, or one for all.
        forward_backward_func: function that runs the micro-batches of a global batch.
    """

    job: Job
    args: Namespace
    model: list[Any]
    optimizer: Any
    scheduler: Any
    data: list[DataIterators]
    forward_backward_func: Callable[..., list[Any]]

    def iterators(self, which: str, number: int = 0) -> Any:
        """Returns a split's iterators in the form that Megatron's schedules take.

        Args:
            which: name of the split.
            number: number of the set, where there are several.
        """
        of_chunks = [getattr(data, which) for data in self.data]
        each = [data[number] if isinstance(data, list) else data for data in of_chunks]
        return each if len(each) > 1 else each[0]


def build_run(job: Job, args: Namespace, processes: Processes | None = None) -> Run:
    """Builds model, optimizer and data of a run, and loads `--load`. Collective.

    Args:
        job: job to run.
        args: flags.
        processes: processes of a job with dedicated servers; None: there are none.
    """
    from megatron_patches.loop.lean.checkpointing import load_checkpoint
    from megatron_patches.loop.lean.config import parameter_scheduler
    from megatron_patches.loop.lean.logs import parameter_count

    model, optimizer = build_model_and_optimizer(job, args)
    scheduler = parameter_scheduler(args, optimizer)
    logger.info("parameters on rank 0: %s", f"{parameter_count(model):,}")
    if args.load is not None:
        loaded = load_checkpoint(model, optimizer, scheduler, args)
        if loaded is not None:
            args.iteration = loaded.iteration
            args.consumed_train_samples = loaded.consumed_train_samples
            args.consumed_valid_samples = loaded.consumed_valid_samples
    data = [
        job.build_data(args, *samples_of_splits(args), processes)
        # Ticks hold the micro-batches of all chunks.
        for _ in (model[:1] if args.distca else model)
    ]
    forward_backward_func = choose_forward_backward_func(job, args)
    return Run(job, args, model, optimizer, scheduler, data, forward_backward_func)


def choose_forward_backward_func(job: Job, args: Namespace) -> Callable[..., list[Any]]:
    """Returns the job's own function, or megatron-core's schedule for the pipeline."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    own = job.forward_backward_func(args)
    return get_forward_backward_func() if own is None else own


def build_model_and_optimizer(job: Job, args: Namespace) -> tuple[list[Any], Any]:
    """Builds this rank's wrapped model chunks and their optimizer. Collective."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    from megatron_patches.loop.lean.config import ddp_config, optimizer_config, transformer_config

    config = transformer_config(args)
    model: list[Any] = []
    virtual_stages = args.virtual_pipeline_model_parallel_size
    for number in range(virtual_stages or 1):
        vp_stage = None if virtual_stages is None else number
        ends = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
        chunk = job.build_model(
            args,
            config,
            parallel_state.is_pipeline_first_stage(**ends),
            parallel_state.is_pipeline_last_stage(**ends),
            vp_stage,
        )
        chunk.model_type = ModelType.encoder_or_decoder
        if torch.cuda.is_available():
            chunk.cuda(torch.cuda.current_device())
        model.append(Float16Module(config, chunk) if args.bf16 else chunk)
    model = [
        DistributedDataParallel(
            config,
            ddp_config(args),
            chunk,
            # Gradients of later virtual stages are ready at odd times: one bucket each.
            disable_bucketing=number > 0,
        )
        for number, chunk in enumerate(model)
    ]
    for chunk in model:
        chunk.broadcast_params()
    one_or_all = model[0] if len(model) == 1 else model
    optimizer = get_megatron_optimizer(optimizer_config(args), model)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if args.overlap_grad_reduce:
        syncs = [chunk.no_sync for chunk in model]
        config.no_sync_func = syncs if isinstance(one_or_all, list) else syncs[0]
    if args.overlap_param_gather:
        gathers = [chunk.start_param_sync for chunk in model]
        config.param_sync_func = gathers if isinstance(one_or_all, list) else gathers[0]
    return model, optimizer


def forward_backward(run: Run, which: str, forward_only: bool) -> dict[str, float]:
    """Runs all micro-batches of a global batch, and averages the loss function's reports.

    Every rank returns the averages, also where another pipeline stage computed the loss.
    """
    totals = _run_global_batch(run, which, 0, forward_only)
    return {name: total / count for name, (total, count) in totals.items()}


def _run_global_batch(
    run: Run, which: str, number: int, forward_only: bool
) -> dict[str, tuple[float, float]]:
    """Runs all micro-batches of a global batch, and sums up the loss function's reports.

    Returns:
        The sum and the count of each, on every rank.
    """
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    from megatron_patches.loop.lean.logs import sum_reports

    args = run.args
    micro_batches = (
        args.eval_global_batch_size // (args.micro_batch_size * args.data_parallel_size)
        if forward_only
        else get_num_microbatches()
    )
    reports = run.forward_backward_func(
        forward_step_func=run.job.forward_step,
        data_iterator=run.iterators(which, number),
        model=run.model,
        num_microbatches=micro_batches,
        # A micro-batch is one packed sequence, however many windows it holds.
        seq_length=args.seq_length * args.micro_batch_size,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    totals = sum_reports(
        reports, parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    if args.pipeline_model_parallel_size > 1:
        shared = [totals]
        dist.broadcast_object_list(
            shared,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        totals = shared[0]
    return totals


def train_step(run: Run) -> tuple[dict[str, float], bool, float | None]:
    """Runs one iteration.

    Returns:
        Averages of the loss function's reports, whether the update was skipped, and the gradient
        norm.

    Raises:
        ValueError: the loss is not a number, unless `--no-check-for-nan-in-loss-and-grad`.
    """
    from megatron.core import num_microbatches_calculator as batch_size

    batch_size.update_num_microbatches(run.args.consumed_train_samples)
    samples = batch_size.get_current_global_batch_size()
    for chunk in run.model:
        chunk.train()
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()
    losses = forward_backward(run, "train", forward_only=False)
    if run.args.num_experts:
        from megatron_patches.model.experts import auxiliary_losses

        losses |= auxiliary_losses(run.args, batch_size.get_num_microbatches())
    if run.args.check_for_nan_in_loss_and_grad and not np.isfinite(losses["lm loss"]):
        raise ValueError(
            f"the loss is {losses['lm loss']} at iteration {run.args.iteration + 1}: lower --lr, "
            "or go on all the same with --no-check-for-nan-in-loss-and-grad"
        )
    successful, grad_norm, _ = run.optimizer.step()
    if successful:
        run.scheduler.step(increment=samples)
    run.args.iteration += 1
    run.args.consumed_train_samples += samples
    return losses, not successful, grad_norm


@torch.no_grad()
def evaluate(run: Run, which: str, number: int = 0) -> dict[str, float]:
    """Evaluates the mean losses of global batches of a split: `--eval-iters` of them, or all.

    Args:
        run: run whose model is evaluated.
        which: name of the split.
        number: number of the set, where there are several.
    """
    args = run.args
    for chunk in run.model:
        chunk.eval()
    iterators = run.iterators(which, number)
    one = iterators[0] if isinstance(iterators, list) else iterators
    sums: dict[str, tuple[float, float]] = {}
    for _ in range(len(one) if args.full_validation else args.eval_iters):
        for name, (total, count) in _run_global_batch(run, which, number, True).items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + total, before[1] + count
        if which == "valid" and not args.full_validation:
            args.consumed_valid_samples += args.eval_global_batch_size
    return {name: total / count for name, (total, count) in sums.items()}


def _train(run: Run) -> None:
    """Trains, evaluates and saves until the last iteration, an exit interval or a signal."""
    from megatron_patches.loop.lean.logs import TrainingLog
    from megatron_patches.loop.lean.throughput import Throughput

    args = run.args
    throughput = Throughput(args, run.model) if args.log_throughput else None
    log = TrainingLog(args, args.iteration, throughput)
    terminated = TerminationSignal() if args.exit_signal_handler else None
    save = functools.partial(_save, run)
    started = time.monotonic()
    saved_at = args.iteration
    while args.iteration < args.train_iters:
        cpu_seconds, consumed = time.process_time(), args.consumed_train_samples
        losses, skipped, grad_norm = train_step(run)
        cpu_seconds = time.process_time() - cpu_seconds
        log.iteration_done(
            args.iteration,
            losses,
            samples=args.consumed_train_samples - consumed,
            learning_rate=run.optimizer.param_groups[0]["lr"],
            loss_scale=run.optimizer.get_loss_scale().item(),
            grad_norm=grad_norm,
            skipped=skipped,
            cpu_seconds=cpu_seconds,
        )
        paused = time.perf_counter()
        if evaluates(args) and args.iteration % args.eval_interval == 0:
            _validate(run, log, f"iteration {args.iteration}")
        if args.save_interval and args.iteration % args.save_interval == 0:
            save()
            saved_at = args.iteration
        log.pause(time.perf_counter() - paused)
        if _must_exit(args, terminated, started):
            logger.info("exiting at iteration %d", args.iteration)
            break
    else:
        if evaluates(args):
            where = f"iteration {args.iteration} on the"
            _validate(run, log, f"{where} validation set")
            if run.iterators("test") is not None:
                log.evaluated(f"{where} test set", evaluate(run, "test"), args.iteration)
    if args.save and saved_at != args.iteration:
        save()
    log.close()
    for data in run.data:
        data.close()


def _validate(run: Run, log: Any, where: str) -> None:
    """Evaluates each validation set, and logs its loss."""
    valid = run.data[0].valid
    count = len(valid) if isinstance(valid, list) else 1
    for number, suffix in enumerate(suffixes(run.args, count)):
        log.evaluated(where, evaluate(run, "valid", number), run.args.iteration, suffix)


def _must_exit(args: Namespace, terminated: TerminationSignal | None, started: float) -> bool:
    """Whether the run ends before its last iteration. Collective."""
    if terminated is not None and terminated.came_on_any_rank():
        logger.info("exiting because of SIGTERM")
        return True
    if args.exit_duration_in_mins is not None:
        late = torch.tensor([int(time.monotonic() - started > 60 * args.exit_duration_in_mins)])
        if dist.get_backend() == "nccl":
            late = late.cuda()
        dist.all_reduce(late, op=dist.ReduceOp.MAX)
        if late.item():
            return True
    return bool(args.exit_interval) and args.iteration % args.exit_interval == 0


def _save(run: Run) -> None:
    from megatron_patches.loop.lean.checkpointing import LoadedState, save_checkpoint

    args = run.args
    if args.overlap_param_gather:
        # The optimizer leaves it to the next forward pass to gather what other ranks updated.
        for chunk in run.model:
            chunk.start_param_sync(force_sync=True)
    state = LoadedState(args.iteration, args.consumed_train_samples, args.consumed_valid_samples)
    save_checkpoint(run.model, run.optimizer, run.scheduler, args, state)
