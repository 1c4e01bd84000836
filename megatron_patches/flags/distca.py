"""The `--distca` flags, and the mask and attention shape that arguments describe."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from pathlib import Path

from distca.cost.latent_rows import LATENT_ROWS
from distca.cost.volume import BACKWARD_INPUTS
from distca.plan import LayerMasks, Mask
from distca.schedule import SCHEDULERS
from distca.schedule.program import ABLATIONS
from distca.transport.collective import MAX_CTAS, MOST_CTAS
from distca.transport.nvshmem import NVSHMEM_MODES
from megatron_patches.flags.parallel import ParallelSizes

PLACEMENTS = ("free", "sequential")
TRANSPORTS = ("auto", "collective", "shm", "nvshmem")


def add_distca_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds the group of `--distca` flags to a parser with Megatron-LM's flags."""
    group = parser.add_argument_group("distca", "core attention disaggregation")
    group.add_argument(
        "--distca",
        action="store_true",
        help="Compute core attention on attention servers: every rank can compute tasks of all "
        "ranks with the same tensor-parallel index. Off: plain Megatron on the same data.",
    )
    group.add_argument(
        "--distca-scheduler",
        choices=list(SCHEDULERS),
        default="tiles",
        help="Decides which rank owns which tokens and computes which task. tiles: moves tiles of "
        "queries and keys, with the fewest bytes on the busiest rank; greedy: the paper's "
        "scheduler; the others are baselines that move no queries.",
    )
    group.add_argument(
        "--distca-placement",
        choices=PLACEMENTS,
        default="free",
        help="free: the scheduler chooses the ranks and micro-batches of a global batch's "
        "documents; sequential: documents lie one after the other, as in the paper. The loss "
        "is the same.",
    )
    group.add_argument(
        "--distca-tolerance",
        type=float,
        default=0.1,
        help="How far a server's load may exceed the mean, as a fraction of the mean.",
    )
    group.add_argument(
        "--distca-max-buffer-bytes",
        type=int,
        default=None,
        metavar="BYTES",
        help="Most bytes of queries, keys and values that a server receives for a layer (tiles "
        "only). Default: no limit.",
    )
    group.add_argument(
        "--distca-gpus-per-node",
        type=int,
        default=None,
        metavar="N",
        help="GPUs of a node; bytes between them are cheaper (tiles only). Default: the processes "
        "that torchrun starts on a node; without torchrun, all GPUs are equally far apart.",
    )
    group.add_argument(
        "--distca-node-gb-per-s",
        type=float,
        default=450.0,
        help="Speed of the links inside a node, in GB/s for each GPU and direction.",
    )
    group.add_argument(
        "--distca-network-gb-per-s",
        type=float,
        default=50.0,
        help="Speed of the network between nodes, in GB/s for each GPU and direction.",
    )
    group.add_argument(
        "--distca-server-speeds",
        type=float,
        nargs="+",
        default=None,
        metavar="SPEED",
        help="Relative speeds of unequal attention servers: the data-parallel ranks of the first "
        "stage, of the second, ..., then dedicated servers (tiles only).",
    )
    group.add_argument(
        "--distca-servers",
        type=_dedicated_processes,
        default=0,
        metavar="inplace|dedicated:N",
        help="inplace: every rank is an attention server. dedicated:N: the last N processes only "
        "compute attention and hold no model; Megatron's sizes count the other processes. "
        "Dedicated servers count as one server for each tensor-parallel group. Default: "
        "inplace.",
    )
    group.add_argument(
        "--distca-context-parallel-size",
        type=int,
        default=None,
        metavar="N",
        help="Ranks that share documents with per-document-cp, ring-zigzag and wlb-llm. Default: "
        "the fewest that hold the longest document.",
    )
    group.add_argument(
        "--distca-backward",
        choices=BACKWARD_INPUTS,
        default="resend",
        help="resend: the backward pass sends the kernels' inputs again; keep: servers keep them, "
        "which moves fewer bytes and needs more memory.",
    )
    group.add_argument(
        "--distca-latent-rows",
        choices=LATENT_ROWS,
        default="auto",
        help="With --multi-latent-attention. on: latents travel, and servers expand them with "
        "their own copy of the layer's weight, so they stay in a pipeline stage; off: keys "
        "and values travel; auto: latents where possible, if the saved bytes take longer than"
        " expanding them again.",
    )
    group.add_argument(
        "--distca-ping-pong",
        action=BooleanOptionalAction,
        default=True,
        help="Run each micro-batch as two nano-batches: one computes while the other communicates.",
    )
    group.add_argument(
        "--distca-cuda-graphs",
        action="store_true",
        help="Capture the layers around core attention in CUDA graphs: fewer launches, more "
        "memory. No GPU has run it.",
    )
    group.add_argument(
        "--distca-sm-margin",
        type=int,
        default=0,
        metavar="N",
        help="SMs that FlashAttention 3 leaves free for exchanges; `distca tune overlap` measures "
        "the best number. No GPU has run it.",
    )
    group.add_argument(
        "--distca-transport",
        choices=TRANSPORTS,
        # Not auto: on GPUs that would be a transport that no GPU has run yet.
        default="collective",
        help="Moves rows between ranks. collective: NCCL on GPUs, gloo on CPUs; shm: shared memory"
        " between CPU processes of one machine; nvshmem: one-sided puts between GPUs; auto: "
        "nvshmem on GPUs where it starts, else collective.",
    )
    group.add_argument(
        "--distca-nvshmem-mode",
        choices=NVSHMEM_MODES,
        default="kernel",
        help="kernel: a kernel on few SMs copies; copy-engine: copy engines copy, which leaves all"
        " SMs to compute.",
    )
    group.add_argument(
        "--distca-nccl-max-ctas",
        type=int,
        default=MAX_CTAS,
        metavar="N",
        help="Most thread blocks of an exchange over NCCL. Each occupies most of an SM, also while"
        " it waits for a late rank. Use more on links faster than a network card. A power of "
        f"two, at most {MOST_CTAS}.",
    )
    group.add_argument(
        "--distca-ablation",
        choices=ABLATIONS,
        default="none",
        help="For measurements. single-stream: wait for every exchange where it starts; signal: "
        "send one byte for each message, so that losses mean nothing.",
    )
    group.add_argument(
        "--distca-pool-stages",
        action=BooleanOptionalAction,
        default=True,
        help="Attention servers of all pipeline stages share the tasks of a tick. Off: only those "
        "of the same stage.",
    )
    group.add_argument(
        "--distca-max-in-flight",
        type=int,
        default=None,
        metavar="N",
        help="Most micro-batches whose activations a pipeline stage holds; fewer need more ticks. "
        "Default: no limit.",
    )
    group.add_argument(
        "--distca-chain",
        type=int,
        default=1,
        metavar="N",
        help="Consecutive micro-batches that share documents, which may then be longer than a "
        "micro-batch. For pipelines: more and smaller micro-batches leave less idle time and "
        "need less memory.",
    )
    group.add_argument(
        "--distca-pool-size",
        type=int,
        default=None,
        metavar="N",
        help="Ranks of a server pool: each N neighbouring data-parallel ranks share attention only"
        " with each other. Documents are assigned to pools by their total work, and to "
        "micro-batches by their tokens, which may differ. Default: no pools, all ranks share "
        "attention.",
    )
    group.add_argument(
        "--distca-head-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="Neighbouring data-parallel ranks that share the heads of core attention by "
        "all-to-alls (Ulysses) and act as one attention server. Use ranks of one node, or of "
        "whole nodes. Default: 1, each rank computes all heads of its tasks.",
    )
    group.add_argument(
        "--distca-wide-documents",
        type=int,
        default=None,
        metavar="TOKENS",
        help="With --distca-pool-size: documents of at least TOKENS tokens are shared by all "
        "ranks, in micro-batches of their own, and not by a pool. Not with pipelines. Default: "
        "pools have all documents.",
    )
    group.add_argument(
        "--distca-token-pairs",
        type=float,
        default=None,
        metavar="PAIRS",
        help="With --distca-pool-size: query-key pairs whose attention takes as long as the other "
        "layers of one token; `distca simulate` prints it. Default: by the number of "
        "operations.",
    )
    group.add_argument(
        "--distca-memory-gb",
        type=float,
        default=None,
        metavar="GB",
        help="With --distca-pool-size: most memory of a GPU that a training step may need, by the "
        "memory model of `distca simulate`. Micro-batches become more and smaller where one would "
        "need more, and a pipeline holds fewer at a time where that does not suffice. A run ends "
        "at its start if its longest document needs more alone. Default: the memory of the "
        "smallest GPU; without GPUs, no limit.",
    )
    group.add_argument(
        "--distca-trace",
        type=Path,
        default=None,
        metavar="FILE",
        help="Write a timeline of all ranks' ticks, exchanges and kernels, for ui.perfetto.dev.",
    )
    group.add_argument(
        "--distca-trace-iterations",
        type=int,
        nargs=2,
        default=(2, 3),
        metavar=("FIRST", "LAST"),
        help="First and last iteration of the timeline, counted from 1 at the start of the "
        "process. Default: 2 3.",
    )
    group.add_argument(
        "--distca-metrics",
        type=Path,
        default=None,
        metavar="FILE",
        help="Write the figures of each log line as metrics of Prometheus, for node_exporter's "
        "textfile collector. The last rank writes; the name should end in .prom. Also without "
        "--distca.",
    )
    group.add_argument(
        "--distca-profile",
        type=Path,
        default=None,
        metavar="FILE",
        help="Kernel times measured by `distca profile`, by which plans balance work. Default: "
        "query-key pairs.",
    )
    group.add_argument(
        "--distca-max-document-length",
        type=int,
        default=None,
        metavar="TOKENS",
        help="Longest document; longer ones are cut into pieces, which are shuffled. Default: the "
        "window, data-parallel size times --seq-length (times --distca-chain); a resumed run "
        "keeps its checkpoint's. Only with --distca-pool-size may documents be longer than the "
        "window. Also applies without --distca.",
    )
    group.add_argument(
        "--distca-whole-documents",
        action="store_true",
        help="Never cut documents: they fill packs of --distca-max-document-length tokens, with "
        "padding that has no loss; longer documents are refused. Default pack: the window, or"
        " --seq-length without --distca. --sft always does this.",
    )
    group.add_argument(
        "--distca-share-prefixes",
        action="store_true",
        help="With --sft: compute the tokens that conversations share at their beginnings once. "
        "The loss is that of the conversations one by one. Needs --distca.",
    )
    group.add_argument(
        "--distca-documents",
        default=None,
        metavar="MODULE:FUNCTION",
        help="Function of (args, split) that returns the documents of train, valid and test, "
        "instead of --data-path. Also applies without --distca.",
    )
    group.add_argument(
        "--from-hf",
        default=None,
        metavar="FOLDER",
        help="Start from a model of Hugging Face: its config.json sets the flags of the "
        "architecture, its tokenizer is the run's, and its weights are converted once to "
        "FOLDER.megatron-bfloat16 (or -float32), unless --load has a checkpoint. Also applies "
        "without --distca.",
    )
    # Arguments without a flag, which a checkpoint notes (`batches/resuming.py`).
    parser.set_defaults(train_stream_start=0, valid_stream_start=0, iteration=0)
    return parser


APPLY_WITHOUT_DISTCA = (
    "--distca-max-document-length",
    "--distca-whole-documents",
    "--distca-documents",
    "--distca-metrics",
    "--from-hf",
)
"""Flags about documents, metrics and the model, which our script follows in plain Megatron, too."""


def given_in_vain(args: Namespace, documents: str | None = None) -> list[str]:
    """Returns the flags that have other values than their defaults, as they were given.

    Args:
        args: parsed arguments of a run in which no flag of ours applies.
        documents: default of `--distca-documents`.
    """
    parser = add_distca_arguments(ArgumentParser(add_help=False))
    parser.set_defaults(distca_documents=documents)
    defaults, names = vars(parser.parse_args([])), []
    for action in parser._actions:
        value, default = vars(args)[action.dest], defaults[action.dest]
        # Two numbers are a list as given, and a tuple as a default.
        if value != (list(default) if isinstance(value, list) and default else default):
            switched_off = isinstance(action, BooleanOptionalAction) and not value
            names.append(action.option_strings[-1 if switched_off else 0])
    return names


def _dedicated_processes(value: str) -> int:
    """Parses `--distca-servers` to the number of processes that only serve."""
    kind, _, number = value.partition(":")
    if kind == "inplace" and not number:
        return 0
    if kind == "dedicated" and number.isdecimal() and int(number) > 0:
        return int(number)
    raise ArgumentTypeError(f"{value!r} is neither inplace nor dedicated:N with N at least 1")


def mask_of_window(window: tuple[int, int] | None) -> Mask:
    """Returns the mask that `--window-size` describes.

    Raises:
        ValueError: a window that looks ahead, or a negative one.
    """
    if window is None:
        return Mask()
    left, right = window
    if right != 0:
        raise ValueError(
            f"--window-size {left},{right}: documents are attended causally, so the second number "
            "must be 0"
        )
    return Mask() if left == -1 else Mask(left)


def masks_from_args(args: Namespace) -> LayerMasks:
    """Returns the masks of the model's layers, as `--window-attn-skip-freq` alternates them.

    Raises:
        ValueError: a window that looks ahead, or a negative one; or no mask for each layer.
    """
    window, skipped = mask_of_window(args.window_size), args.window_attn_skip_freq
    count = args.num_layers
    if skipped is None:
        return LayerMasks((window,))
    if isinstance(skipped, int):
        windowed = [layer % skipped != 0 for layer in range(1, count + 1)]
    else:
        windowed = [bool(each) for each in skipped]
        if len(windowed) != count:
            raise ValueError(
                f"--window-attn-skip-freq has {len(windowed)} values, but --num-layers is {count}: "
                "give one for each layer, 1 for those with a window, or a number"
            )
    return LayerMasks.of(window if each else Mask() for each in windowed)


def masks_of_a_chunk(args: Namespace) -> LayerMasks:
    """Returns the masks of a model chunk's layers, which those of all chunks have.

    Behind them are those of layers of multi-token prediction, which Megatron-LM numbers from 1, as
    the model's.

    Raises:
        ValueError: layers of the same place in two chunks have different masks.
    """
    masks = masks_from_args(args)
    sizes = ParallelSizes.from_args(args)
    layers = args.num_layers // (sizes.stages * sizes.chunks)
    pattern = [masks.of_layer(layer) for layer in range(layers)]
    for layer in range(args.num_layers):
        if masks.of_layer(layer) != pattern[layer % layers]:
            raise ValueError(
                f"--window-attn-skip-freq gives layer {layer + 1} another mask than layer "
                f"{layer % layers + 1}, which runs at the same time: stages share servers "
                f"and need the same windows in each {layers} layers; choose pipeline sizes for "
                "which the pattern repeats"
            )
    behind = [masks.of_layer(layer) for layer in range(args.mtp_num_layers or 0)]
    if sizes.stages == 1 or not behind:
        return LayerMasks.of([*pattern, *behind])
    of_all, of_last = LayerMasks.of(pattern), LayerMasks.of(behind)
    return LayerMasks(
        of_all.masks + of_last.masks,
        (*of_all.pattern, *(len(of_all.masks) + number for number in of_last.pattern)),
        len(of_last.masks),
    )
