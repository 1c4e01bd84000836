"""Small Megatron models on live ranks: one run of a job with documents of given lengths."""

from __future__ import annotations

import re
import zlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_patches.flags.config import DistcaConfig
from support.ranks import chosen, forget_megatron

MODEL = """
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4
    --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 1 --lr 1e-2 --lr-decay-style constant
    --make-vocab-size-divisible-by 64 --tokenizer-type NullTokenizer --vocab-size 250
    --eval-iters 0 --weight-decay 0.1 --max-position-embeddings 65536
""".split()

# Of that model.
HEADS, HEAD_DIM = 4, 16


@dataclass(frozen=True)
class MemoryCorpus:
    """Documents of random tokens with a structure that a model can learn.

    Attributes:
        lengths: tokens of each document.
        weighted: whether not all tokens count alike: of four documents in a row, in the first all
            count, in the second the last half, in the third some by half or twice, in the last
            none.
    """

    lengths: np.ndarray
    weighted: bool = False
    shares_tokens = False

    def read(self, document: int, start: int, end: int) -> np.ndarray:
        generator = np.random.default_rng(document)
        first = generator.integers(0, 50)
        noise = generator.integers(0, 3, size=int(self.lengths[document]))
        tokens = (first + np.arange(self.lengths[document]) + noise) % 50
        return tokens[start:end].astype(np.int64)

    def loss_weights(self, document: int, start: int, end: int) -> np.ndarray | None:
        if not self.weighted or document % 4 == 0:
            return None
        positions = np.arange(start, end)
        return [
            (positions >= self.lengths[document] // 2).astype(float),
            np.array([0.0, 0.5, 2.0])[positions % 3],
            np.zeros(end - start),
        ][document % 4 - 1]


def memory_stream(lengths: Sequence[int], weighted: bool = False) -> Any:
    """A token stream of documents in the given order; `weighted` as for `MemoryCorpus`."""
    from megatron_patches.batches.stream import TokenStream

    column = np.asarray(lengths, dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(column)])
    corpus = MemoryCorpus(column, weighted)
    numbers, zeros = np.arange(len(column)), np.zeros_like(column)
    return TokenStream((corpus,), zeros, numbers, zeros, offsets)  # type: ignore[arg-type]


@dataclass
class StepsDone:
    """What a rank saw of some training steps.

    Attributes:
        losses: losses of each step.
        grad_norms: gradient norm of each step.
        gradients: the first step's, by parameter name, with the dimension that TP splits or None.
        bytes_counted: bytes sent by phase, as the transport counted them.
        bytes_planned: the same as the plans predict them.
        place: (tensor-parallel rank, data-parallel rank).
        serves_only: it is a dedicated server, which has no losses and no gradients.
        micro_batches: those of the plans of the first step, with `--distca`.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: dict[str, tuple[torch.Tensor, int | None]] = field(default_factory=dict)
    bytes_counted: dict[str, int] = field(default_factory=dict)
    bytes_planned: dict[str, int] = field(default_factory=dict)
    place: tuple[int, int] = (0, 0)
    serves_only: bool = False
    micro_batches: int | None = None


UNTIED = "--untie-embeddings-and-output-weights"


def parse(flags: Sequence[str], tied: bool = False) -> Namespace:
    """Parses the flags of a small model, and others that win over those."""
    from megatron_patches.parts import parse_args

    return parse_args(command_line(flags, tied), dist.get_rank(), dist.get_world_size())


def command_line(flags: Sequence[str], tied: bool = False) -> list[str]:
    """The flags of a small model, with others."""
    model = [flag for flag in MODEL if not (tied and flag == UNTIED)]
    chosen_flags = ["--distca-transport", chosen().transport]
    chosen_flags += [] if chosen().ping_pong else ["--no-distca-ping-pong"]
    if not any(flag in flags for flag in ("--per-split-data-args-path", "--distca-documents")):
        model += ["--data-path", "unused"]
    length = [] if "--train-samples" in flags else ["--train-iters", "100"]
    return [*model, *length, *chosen_flags, *flags]


def pad_vocabulary(args: Namespace) -> None:
    """Sets what a run's tokenizer sets."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple


def start_processes(args: Namespace) -> Any:
    """Starts Megatron's state; with dedicated servers first the two kinds of processes, which it
    returns. Collective."""
    from megatron_patches.pipeline.processes import Processes
    from support import training

    dedicated, rank = DistcaConfig.from_args(args).dedicated, dist.get_rank()
    processes = None
    if dedicated:
        # The group of all ranks gives way to a group of each kind, which meet in this store.
        timeout, place = timedelta(seconds=120), [("127.0.0.1", 0)]
        if rank == 0:
            store = dist.TCPStore(*place[0], is_master=True, wait_for_workers=False)
            place = [("127.0.0.1", store.port)]
        dist.broadcast_object_list(place)
        if rank:
            store = dist.TCPStore(*place[0], is_master=False, timeout=timeout)
        dist.destroy_process_group()
        processes = Processes(
            store, rank, args.world_size, dedicated, args.tensor_model_parallel_size, timeout
        )
        processes.init_default_group("nccl" if torch.cuda.is_available() else "gloo")
        if processes.serves_only:
            pad_vocabulary(args)
            return processes
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    # Live ranks start several models, and an earlier one's scale has another shape.
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    training.initialize(args)
    return processes


def own_device() -> torch.device:
    """This rank's GPU, or the CPU."""
    on_gpu = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def make_data(args: Namespace, stream: Any, processes: Any) -> tuple[Any, Any]:
    """The iterators over a stream of our own, and with `--distca` what makes their ticks."""
    from megatron_patches.batches.ticks import PlannedIterator
    from megatron_patches.loop import data
    from megatron_patches.pipeline.data_iterators import TRAIN, DataIterators
    from megatron_patches.pipeline.planned_data import PlannedData

    config, layout = DistcaConfig.from_args(args), data.window_layout(args, processes)
    if not config.enabled:
        return DataIterators(
            data.packed_iterator(config, args, layout, stream, 0), None, None
        ), None
    device = own_device()
    planned = PlannedData.start(config, args, layout, device, processes)
    maker, control = planned.maker(stream, forward_only=False), planned.servers.control
    announce = None if control is None else partial(control.announce, TRAIN)
    ticks = PlannedIterator(maker, 0, planned.micro_batches_at, device, announce=announce)
    return DataIterators(ticks, None, None, control, planned.close), maker


def global_batch(maker: Any, first_sample: int, micro_batches: int) -> Iterator[Any]:
    """This rank's inputs of the ticks of the global batch that starts at a sample."""
    return maker.ticks(maker.planner()(maker.reader.documents(first_sample, micro_batches)), {})


def make_run(args: Namespace, stream: Any, processes: Any = None) -> Any:
    """A run of the real job, over a stream of our own."""
    from support import training

    iterators, made = make_data(args, stream, processes)
    run = training.build_run(args, iterators)
    for chunk in run.model:
        set_weights_by_name(chunk)
    run.optimizer.reload_model_params()
    return run, made


def train(
    flags: Sequence[str],
    lengths: Sequence[int],
    steps: int,
    tied: bool = False,
    weighted: bool = False,
) -> StepsDone:
    """Trains for some steps on this rank, or serves those that do; collective."""
    args = parse(flags, tied)
    processes, stream = start_processes(args), memory_stream(lengths, weighted)
    serves_only = processes is not None and processes.serves_only
    run = serve if serves_only else partial(train_steps, steps=steps)
    done, made = run(args, stream, processes)
    if made is not None:
        transport = made.runtime.core_attention.transport
        heads = made.runtime.heads
        counted = dict(transport.bytes_sent) | ({} if heads is None else heads.bytes_sent)
        done.bytes_counted = {phase: n for phase, n in counted.items() if n}
        done.bytes_planned = bytes_planned(args, made, steps)
        asked = args.global_batch_size // made.reader.layout.samples_per_micro_batch
        done.micro_batches = next(global_batch(made, 0, asked)).schedule.micro_batches
    dist.barrier()

    forget_megatron()
    return done


def bytes_planned(args: Namespace, made: Any, steps: int) -> dict[str, int]:
    """The bytes that the plans of some steps say this rank sends, by phase."""
    planned: dict[str, int] = {}
    micro_batches = args.global_batch_size // made.reader.layout.samples_per_micro_batch
    for first_sample in range(0, steps * args.global_batch_size, args.global_batch_size):
        for tick in global_batch(made, first_sample, micro_batches):
            for phase, sent in tick.bytes_sent.items():
                if sent:
                    planned[phase] = planned.get(phase, 0) + sent
    return planned


def train_steps(args: Namespace, stream: Any, processes: Any, steps: int) -> tuple[StepsDone, Any]:
    """Trains; what was seen, and what made the batches."""
    from megatron.core import parallel_state

    from support import training

    run, made = make_run(args, stream, processes)
    done = StepsDone(
        place=(
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
        )
    )
    optimizer_step = run.optimizer.step

    def noted_step() -> Any:
        if not (done.gradients or args.use_distributed_optimizer):
            for chunk in run.model:
                done.gradients |= collect_gradients(chunk)
        return optimizer_step()

    run.optimizer.step = noted_step
    for _ in range(steps):
        losses, _, grad_norm = training.train_step(run)
        done.losses.append(losses["lm loss"])
        done.grad_norms.append(float(grad_norm))
    run.data.close()
    return done, made


def serve(args: Namespace, stream: Any, processes: Any) -> tuple[StepsDone, Any]:
    """What a dedicated server does while the others train; and what made its plans."""
    from megatron_patches.model.latent_attention import softmax_scale
    from megatron_patches.pipeline import attention_server
    from megatron_patches.pipeline.progress import Progress

    iterators, made = make_data(args, stream, processes)
    progress = Progress()
    attention_server.serve(lambda: iterators, args.params_dtype, softmax_scale(args), progress)
    return StepsDone(serves_only=True), made


def starts_of_micro_batches(flags: Sequence[str], lengths: Sequence[int]) -> list[list[int]]:
    """Where the documents of each micro-batch of the first step start in the stream; collective."""

    from megatron_patches.loop.data import window_layout
    from megatron_patches.pipeline.planned_data import PlannedData
    from support import training

    args = parse(flags)
    training.initialize(args)
    config, device = DistcaConfig.from_args(args), torch.device("cpu")
    planned = PlannedData.start(config, args, window_layout(args), device)
    reader = planned.reader(memory_stream(lengths), forward_only=False)
    incoming = reader.documents(0, planned.micro_batches_at(0))
    micro_batches = reader.planner.share_out(incoming)
    found = [documents.starts.tolist() for documents in micro_batches]
    forget_megatron()
    return found


def train_all(
    runs: Sequence[Sequence[str]], lengths: Sequence[int], steps: int, weighted: bool = False
) -> list[StepsDone]:
    """Several runs, one after the other in the same processes."""
    return [train(flags, lengths, steps, weighted=weighted) for flags in runs]


def named_parameters(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """A model chunk's parameters by the names that they have in the whole model."""
    from megatron.core import parallel_state

    gpt = model
    while hasattr(gpt, "module"):
        gpt = gpt.module
    first_layer = gpt.decoder.layers[0].layer_number - 1
    for name, parameter in gpt.named_parameters():
        if gpt.share_embeddings_and_output_weights and name == "output_layer.weight":
            if hasattr(gpt, "embedding"):
                # Of multi-token prediction: Megatron makes both, and uses the embedding's.
                continue
            name = "embedding.word_embeddings.weight"
        name = re.sub(
            r"(?<=decoder\.layers\.)\d+", lambda number: str(int(number[0]) + first_layer), name
        )
        if "local_experts" in name:
            # Each of the ranks that share a layer's experts numbers its own from 0.
            own = (
                gpt.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
            )
            before = own * parallel_state.get_expert_model_parallel_rank()
            number = int(re.findall(r"local_experts\.(\d+)", name)[0]) + before
            name = re.sub(r"(?<=local_experts\.)\d+", str(number), name)
        yield name, parameter


def place_in_tensor(name: str, parameter: torch.nn.Parameter) -> tuple[bool, int, int]:
    """Whether ranks share a parameter, in how many parts, and the number of this rank's."""
    from megatron.core import parallel_state

    if "local_experts" in name:
        parts = parallel_state.get_expert_tensor_parallel_world_size()
        return parts > 1, parts, parallel_state.get_expert_tensor_parallel_rank()
    return (
        getattr(parameter, "tensor_model_parallel", False),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )


@torch.no_grad()
def set_weights_by_name(model: Any) -> None:
    """The same weights in every layout: Megatron draws other ones on each pipeline stage."""
    for name, parameter in named_parameters(model):
        sink = name.endswith("softmax_offset")
        if parameter.dim() < 2 and not sink:
            continue
        shape = list(parameter.shape)
        split, parts, part = place_in_tensor(name, parameter)
        if split:
            shape[parameter.partition_dim] *= parts
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        weight = (1.0 if sink else 0.02) * torch.randn(shape, generator=generator)
        if split and "linear_fc1" in name:
            weight = torch.cat([half.chunk(parts)[part] for half in weight.chunk(2)])
        elif split:
            weight = weight.chunk(parts, parameter.partition_dim)[part]
        parameter.copy_(weight)


def collect_gradients(model: Any) -> dict[str, tuple[torch.Tensor, int | None]]:
    """Gradients of a model chunk, with the dimension that TP splits or None."""
    return {
        name: (
            parameter.main_grad.clone(),
            parameter.partition_dim if place_in_tensor(name, parameter)[0] else None,
        )
        for name, parameter in named_parameters(model)
    }


def whole_gradients(ranks: Sequence[StepsDone]) -> dict[str, torch.Tensor]:
    """The gradients of the whole model, from all ranks of one replica.

    Queries, keys and values each have an entry: those of values are so much larger that in one norm
    with them a wrong gradient of queries or keys would not be seen.
    """
    # Each parameter is taken of the first replica that has it: replicas may share experts.
    with_model = [rank for rank in ranks if not rank.serves_only]
    shards = sorted(with_model, key=lambda rank: rank.place[::-1], reverse=True)
    whole = {}
    names = {name: shard.gradients[name] for shard in shards for name in shard.gradients}
    for name, (gradient, dimension) in names.items():
        # The first and the last stage both have the gradient of a tied embedding.
        by_rank = {s.place[0]: s.gradients[name][0] for s in shards if name in s.gradients}
        parts = [by_rank[rank] for rank in sorted(by_rank)]
        if dimension is None or len(parts) == 1:
            whole[name] = gradient
        elif "linear_fc1" in name:
            # Each rank holds its part of the gate, then its part of the other half.
            halves = zip(*(part.chunk(2, dim=0) for part in parts), strict=True)
            whole[name] = torch.cat([torch.cat(half) for half in halves])
        else:
            whole[name] = torch.cat(parts, dim=dimension)
    for name in [name for name in whole if "linear_qkv" in name]:
        whole |= of_queries_keys_values(name, whole.pop(name))
    return whole


def of_queries_keys_values(name: str, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts of a fused weight, whose rows are a group's queries, its key, its value; and so on.

    Args:
        name: name of the weight.
        gradient: `[(HEADS + 2 * groups) * HEAD_DIM, ...]`.
    """
    groups = (len(gradient) // HEAD_DIM - HEADS) // 2
    rows = gradient.view(groups, -1, *gradient.shape[1:])
    parts = rows.split([HEADS // groups * HEAD_DIM, HEAD_DIM, HEAD_DIM], dim=1)
    return {f"{name}, {part}": t for part, t in zip("qkv", parts, strict=True)}
