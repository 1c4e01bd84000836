"""Core attention disaggregation in one file, on megatron-core alone.

    torchrun --nproc-per-node 2 examples/minimal_loop.py

Documents -> plan -> layers -> loss -> optimizer step, on GPUs, or on CPU cores where there are
none. With `--plain` the same model trains on the same documents without plans, each cut where a
rank's tokens end. With `--distca-servers dedicated:1` the last process has no model and only
computes core attention for the others. `pretrain_gpt.py` runs the same parts in Megatron-LM's loop.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from distca.attention import select_kernel
from distca.cost.kernel_time import AnalyticCost
from distca.cost.volume import AttentionShape
from distca.documents.document_list import DocumentList, ListedDocuments
from distca.documents.lengths import Fixed, Mixture, Uniform, draw
from distca.plan import LayerMasks, Mask
from distca.runtime import Buffers, CoreAttention
from distca.schedule import SCHEDULERS, ExecutionOptions, GlobalBatchPlanner, ScheduleConfig
from distca.schedule.program import LayerGroup
from distca.transport import CollectiveTransport
from megatron_patches.batches.layouts import WindowLayout
from megatron_patches.batches.micro_batch import forward_step
from megatron_patches.batches.packed import PackedIterator, PackedReader
from megatron_patches.batches.planned import PlannedReader
from megatron_patches.batches.stream import TokenStream
from megatron_patches.batches.ticks import PlannedIterator, RankRuntime, TickMaker
from megatron_patches.hooks import adapt_megatron_core
from megatron_patches.model.core_attention import DisaggregatedCoreAttention
from megatron_patches.model.ping_pong import run_layers_in_turn
from megatron_patches.model.rotary import rotate_by_position_ids
from megatron_patches.pipeline.attention_server import serve_global_batch
from megatron_patches.pipeline.processes import Processes
from megatron_patches.pipeline.servers import Servers, connect_servers
from megatron_patches.pipeline.tick_pipeline import TickPipeline

VOCABULARY = 512
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


class Documents:
    """Made-up documents (a `DocumentList`), most of whose tokens a model can learn to predict."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, index: int) -> np.ndarray:
        """Returns a document's tokens, int64 `[lengths[index]]`."""
        generator, length = np.random.default_rng(index), int(self.lengths[index])
        noise = generator.integers(0, 3, size=length)
        return (generator.integers(VOCABULARY) + np.arange(length) + noise) % VOCABULARY


def in_turn(documents: DocumentList) -> TokenStream:
    """Returns the stream of all documents, one after the other."""
    source = ListedDocuments("documents", documents, VOCABULARY)
    zeros, offsets = np.zeros(len(documents), np.int64), np.cumsum([0, *source.lengths])
    return TokenStream((source,), zeros, np.arange(len(documents)), zeros, offsets)


def plan_ahead(
    stream: TokenStream,
    layout: WindowLayout,
    config: TransformerConfig,
    servers: Servers,
    options: ExecutionOptions,
    micro_batches: int,
) -> PlannedIterator:
    """Plans the global batches of a stream, one ahead, and gives this rank its part. Collective.

    All ranks make the same plans of the documents' lengths. A plan says which rank owns which
    tokens, and which rank computes which piece of core attention; the runtime sends queries, keys
    and values there, and outputs back.
    """
    parts, table = config.tensor_model_parallel_size, servers.layout
    heads = config.num_attention_heads // parts, config.num_query_groups // parts
    shape = AttentionShape(*heads, config.kv_channels, config.params_dtype.itemsize)
    planner = GlobalBatchPlanner(
        table.servers,
        ScheduleConfig(shape=shape, cost_model=AnalyticCost.of_shape(shape)),
        options,
        LayerMasks((Mask(),)),
        table.dedicated,
    )
    runtime = RankRuntime(
        table,
        CoreAttention(
            CollectiveTransport(servers.group, DEVICE),
            select_kernel(DEVICE.type, config.kv_channels),
            Buffers(DEVICE, 2 if options.ping_pong else 1),
        ),
        *(shape, planner.masks),
        (LayerGroup(range(config.num_layers // table.stages), recomputed=False),),
    )
    ticks = TickMaker(PlannedReader(stream, layout, planner, sequence_shards=1), runtime)
    announce = None if servers.control is None else partial(servers.control.announce, 0)
    return PlannedIterator(ticks, 0, lambda sample: micro_batches, DEVICE, announce=announce)


def start_megatron(seed: int = 1234, **sizes: Any) -> None:
    """Sets megatron-core's process groups, of `sizes` as it names them, and the seed."""
    adapt_megatron_core()  # also where there are no GPUs
    parallel_state.initialize_model_parallel(**sizes)
    # Stages draw weights of their own, data-parallel ranks the same ones.
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def model_config(args: argparse.Namespace) -> TransformerConfig:
    """Makes the configuration of a small Llama, in float32 on CPUs."""
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        bf16=ON_GPU,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=not ON_GPU,
        # The loss is a sum over tokens: which rank or micro-batch has a token does not matter.
        calculate_per_token_loss=True,
        # A GPU's stream orders a send and the end of its tensor; gloo may read the tensor later.
        deallocate_pipeline_outputs=ON_GPU,
    )


def build_stage(
    config: TransformerConfig, pre: bool, post: bool, *, plain: bool, ping_pong: bool
) -> GPTModel:
    """Builds one pipeline stage: Megatron's GPT, in whose layers core attention follows plans.

    The first stage (`pre`) has the embedding, the last one (`post`) the output layer.
    """
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    if not plain:
        spec.submodules.self_attention.submodules.core_attention = DisaggregatedCoreAttention
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=1,  # of learnt positions, which there are none of
        pre_process=pre,
        post_process=post,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    # A rank's tokens may begin in the middle of a document.
    rotate_by_position_ids(model)
    if ping_pong and not plain:
        run_layers_in_turn(model)
    return model


def make_trainable(
    config: Any,
    build: Callable[..., Any],
    ddp: DistributedDataParallelConfig,
    optimizer_config: OptimizerConfig,
    virtual_stages: int | None = None,
) -> tuple[list[Any], Any]:
    """Builds this rank's model chunks, wraps them for data parallelism, and makes the optimizer.

    `build(pre, post)` builds the chunk of a stage, and `build(pre, post, number)` each of several.
    """
    chunks: list[Any] = []
    for number in range(virtual_stages or 1):
        which = [] if virtual_stages is None else [number]
        ends = {"ignore_virtual": not which, "vp_stage": number if which else None}
        pre = parallel_state.is_pipeline_first_stage(**ends)
        post = parallel_state.is_pipeline_last_stage(**ends)
        chunk = build(pre, post, *which).to(DEVICE)
        if config.bf16:
            chunk = Float16Module(config, chunk)
        # Gradients of later virtual stages are ready at odd times: one bucket each.
        chunks.append(DDP(config, ddp, chunk, disable_bucketing=number > 0))
        chunks[-1].broadcast_params()
    optimizer = get_megatron_optimizer(optimizer_config, chunks)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if ddp.overlap_grad_reduce:
        config.no_sync_func = one_or_all([chunk.no_sync for chunk in chunks])
    if ddp.overlap_param_gather:
        config.param_sync_func = one_or_all([chunk.start_param_sync for chunk in chunks])
    return chunks, optimizer


def one_or_all(values: list[Any]) -> Any:
    """Returns the list, or its only value, as Megatron's schedules take it."""
    return values if len(values) > 1 else values[0]


@dataclass
class Run:
    """The parts of a training step, and the attention servers, if core attention follows plans.

    Attributes:
        chunks: model chunks of this rank, wrapped for data parallelism; none on a dedicated server.
        optimizer: megatron-core's optimizer.
        data: endless iterator of micro-batches, or of ticks where core attention follows plans.
        forward_backward: function that runs the micro-batches of a global batch.
        micro_batches: number of those.
        tokens: tokens of a micro-batch on this rank.
        servers: attention servers, or None.
    """

    chunks: list[Any]
    optimizer: Any
    data: Any
    forward_backward: Callable[..., list[Any]]
    micro_batches: int
    tokens: int
    servers: Servers | None = None


def run_global_batch(run: Run, forward_only: bool = False) -> dict[str, float]:
    """Runs a global batch forward and backward, and returns the reports' means. Collective."""
    reports = run.forward_backward(
        forward_step_func=forward_step,
        data_iterator=one_or_all([run.data] * len(run.chunks)),
        model=run.chunks,
        num_microbatches=run.micro_batches,
        seq_length=run.tokens,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    means: list[dict[str, float]] = [{}]
    if reports:
        sums = torch.stack([torch.stack([*report.values()]).double() for report in reports]).sum(0)
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        means = [{name: float(a / b) for name, (a, b) in zip(reports[0], sums, strict=True)}]
    # The last stage has the loss.
    stages = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast_object_list(means, group=stages, group_src=stages.size() - 1)
    return means[0]


def train_step(run: Run) -> dict[str, float]:
    """Trains on a global batch, and returns the means and the gradient norm. Collective."""
    for chunk in run.chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()
    figures = run_global_batch(run) | run.data.take_figures()
    _, norm, _ = run.optimizer.step()
    return figures | {"gradient norm": float(norm)}


def start_torch(dedicated: int = 0, tensor_parallel_size: int = 1) -> Processes | None:
    """Makes torch's default process group, of the processes with a model alone. Collective.

    Returns:
        All processes; None: all have a model.
    """
    backend, timeout = "nccl" if ON_GPU else "gloo", timedelta(minutes=10)
    if ON_GPU:
        torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
    if not dist.is_torchelastic_launched():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return None
    store, rank, size = next(dist.rendezvous("env://"))
    if not 0 <= dedicated < size:
        sys.exit(f"error: of {size} processes {dedicated} only serve: none would have a model")
    processes = Processes(store, rank, size - dedicated, dedicated, tensor_parallel_size, timeout)
    processes.init_default_group(backend)
    return processes if dedicated else None


def build_run(
    args: argparse.Namespace, documents: DocumentList, processes: Processes | None = None
) -> Run:
    """Builds everything on this process, and no model on a dedicated server. Collective."""
    config, stream = model_config(args), in_turn(documents)
    only_serves = processes is not None and processes.serves_only
    stages, parts = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    if not only_serves:
        start_megatron(tensor_model_parallel_size=parts, pipeline_model_parallel_size=stages)
    ranks = dist.get_world_size() if processes is None else processes.with_model
    rank = 0 if only_serves else parallel_state.get_data_parallel_rank()
    layout = WindowLayout(rank, ranks // (parts * stages), args.seq_length, micro_batch_size=1)
    servers, data, chunks, optimizer = None, None, [], None
    if args.plain:
        # A mask of all tokens keeps documents apart in Megatron's own core attention.
        reader = PackedReader(stream, layout, LayerMasks(), dense=True, as_one_sequence=True)
        data = PackedIterator(reader, 0, DEVICE)
        schedule = get_forward_backward_func()
    else:
        servers = connect_servers(DEVICE, processes)
        options = ExecutionOptions(args.distca_scheduler, ping_pong=args.distca_ping_pong)
        data = plan_ahead(stream, layout, config, servers, options, args.micro_batches)
        # Stages work in step, in ticks in which each also computes core attention for the others.
        schedule = TickPipeline()
    if not only_serves:
        dtypes = {"bf16": config.bf16, "params_dtype": config.params_dtype}
        chunks, optimizer = make_trainable(
            config,
            partial(build_stage, config, plain=args.plain, ping_pong=args.distca_ping_pong),
            DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            OptimizerConfig(optimizer="adam", lr=args.lr, clip_grad=1.0, **dtypes),
        )
    return Run(chunks, optimizer, data, schedule, args.micro_batches, args.seq_length, servers)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line; None: this process's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    for name, default in {
        "num-layers": 2,
        "hidden-size": 192,
        "num-attention-heads": 6,
        "num-query-groups": 2,
        "tensor-model-parallel-size": 1,
        "pipeline-model-parallel-size": 1,
        "seq-length": 2048,  # tokens of a micro-batch on each rank
        "micro-batches": 2,  # of a global batch
        "train-iters": 10,
        "lr": 3e-3,
    }.items():
        add(f"--{name}", type=type(default), default=default)
    add("--plain", action="store_true", help="no plans: documents end where a rank's tokens do")
    add("--distca-scheduler", choices=list(SCHEDULERS), default="tiles")
    add("--distca-ping-pong", action=argparse.BooleanOptionalAction, default=True)
    add("--distca-servers", default="inplace", metavar="inplace|dedicated:N")
    args = parser.parse_args(argv)
    found = re.fullmatch(r"inplace|dedicated:([1-9]\d*)", args.distca_servers)
    if found is None or (args.plain and found[1]):
        parser.error("--distca-servers is inplace or, without --plain, dedicated:N")
    args.dedicated = int(found[1] or 0)
    return args


def main() -> None:
    """Trains, and prints a line for each step."""
    args = parse()
    processes = start_torch(args.dedicated, args.tensor_model_parallel_size)
    ranks = dist.get_world_size() if processes is None else processes.with_model
    # One document of twenty is as long as a rank's tokens. Plans are made some steps ahead.
    lengths = Mixture(Uniform(1, 200), Fixed(args.seq_length), 0.05)
    tokens = (args.train_iters + 3) * args.micro_batches * args.seq_length * ranks
    run = build_run(args, Documents(draw(lengths, tokens, seed=0)), processes)
    control = None if run.servers is None else run.servers.control
    if processes is not None and processes.serves_only:
        scale = (args.hidden_size // args.num_attention_heads) ** -0.5
        while control.next_number() is not None:
            serve_global_batch(run.data, model_config(args).params_dtype, scale)
    else:
        for step in range(1, args.train_iters + 1):
            figures = train_step(run).items()
            if dist.get_rank() == 0:
                print(f"step {step}:", ", ".join(f"{n} {x:.3f}" for n, x in figures), flush=True)
        if control is not None:
            control.dismiss()
    if run.servers is not None:
        sent = run.data.runtime.core_attention.transport.bytes_sent
        print(f"server {run.servers.layout.server} sent {sum(sent.values()):,} bytes", flush=True)
    run.data.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
