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
        "ranks with the same tensor-parallel index. Without this flag, plain Megatron trains "
        "on the same data.",
    )
    group.add_argument(
        "--distca-scheduler",
        choices=list(SCHEDULERS),
        default="tiles",
        help="What decides which rank owns which tokens, and which rank computes which task. "
        "tiles: moves tiles of queries and keys, and keeps the bytes of the busiest rank low; "
        "greedy: the paper's scheduler; all others: baselines that move no queries.",
    )
    group.add_argument(
        "--distca-placement",
        choices=PLACEMENTS,
        default="free",
        help="Where the documents of a global batch lie. free: the scheduler chooses their "
        "ranks and micro-batches; sequential: one after the other, as in the paper. The loss "
        "is the same.",
    )
    group.add_argument(
        "--distca-tolerance",
        type=float,
        default=0.1,
        help="How far a server's load may exceed the mean load, as a fraction of the mean.",
    )
    group.add_argument(
        "--distca-max-buffer-bytes",
        type=int,
        default=None,
        metavar="BYTES",
        help="Maximum bytes of queries, keys and values that a server receives for one layer "
        "(scheduler tiles only). Default: no limit.",
    )
    group.add_argument(
        "--distca-gpus-per-node",
        type=int,
        default=None,
        metavar="N",
        help="Number of GPUs per node. Plans of the scheduler tiles then prefer to send bytes "
        "inside a node. Default: the number of processes that torchrun starts on a node; "
        "without torchrun, all GPUs count as equally far apart.",
    )
    group.add_argument(
        "--distca-node-gb-per-s",
        type=float,
        default=450.0,
        help="Speed of the links inside a node, in GB/s per GPU and direction.",
    )
    group.add_argument(
        "--distca-network-gb-per-s",
        type=float,
        default=50.0,
        help="Speed of the network between nodes, in GB/s per GPU and direction.",
    )
    group.add_argument(
        "--distca-server-speeds",
        type=float,
        nargs="+",
        default=None,
        metavar="SPEED",
        help="Relative speeds of unequal attention servers (scheduler tiles only), in this "
        "order: data-parallel ranks of the first pipeline stage, of the second, ..., then "
        "dedicated servers.",
    )
    group.add_argument(
        "--distca-servers",
        type=_dedicated_processes,
        default=0,
        metavar="inplace|dedicated:N",
        help="Processes that compute attention. inplace: every rank is an attention server. "
        "dedicated:N: the last N processes only compute attention and hold no model. "
        "Megatron's parallel sizes then count only the other processes, and each "
        "tensor-parallel group of dedicated processes is one server. Default: inplace.",
    )
    group.add_argument(
        "--distca-context-parallel-size",
        type=int,
        default=None,
        metavar="N",
        help="With the schedulers per-document-cp, ring-zigzag and wlb-llm: number of ranks "
        "that share documents. Default: the smallest number that holds the longest document.",
    )
    group.add_argument(
        "--distca-backward",
        choices=BACKWARD_INPUTS,
        default="resend",
        help="How servers get the kernels' inputs for the backward pass. resend: the inputs "
        "are sent again; keep: servers keep the inputs, which moves fewer bytes and needs more "
        "memory.",
    )
    group.add_argument(
        "--distca-latent-rows",
        choices=LATENT_ROWS,
        default="auto",
        help="With --multi-latent-attention: what ranks send to servers. on: latents, which "
        "servers expand with their own copy of the layer's weight, so only servers of the same "
        "pipeline stage get them; off: keys and values; auto: latents, if possible and if the "
        "saved bytes take longer to send than latents to expand.",
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
        help="Capture the layers around core attention in CUDA graphs. This needs fewer "
        "launches and more memory. No GPU has run it.",
    )
    group.add_argument(
        "--distca-sm-margin",
        type=int,
        default=0,
        metavar="N",
        help="Number of SMs that FlashAttention 3 leaves free for exchanges. `distca tune "
        "overlap` measures the best number. No GPU has run it.",
    )
    group.add_argument(
        "--distca-transport",
        choices=TRANSPORTS,
        # Not auto: on GPUs that would be a transport that no GPU has run yet.
        default="collective",
        help="What moves queries, keys, values and outputs between ranks. collective: NCCL on "
        "GPUs, gloo on CPUs; shm: shared memory between CPU processes of one machine; nvshmem: "
        "one-sided puts between GPUs; auto: nvshmem on GPUs if it starts, else collective.",
    )
    group.add_argument(
        "--distca-nvshmem-mode",
        choices=NVSHMEM_MODES,
        default="kernel",
        help="What copies with --distca-transport nvshmem. kernel: a kernel on few SMs; "
        "copy-engine: the GPU's copy engines, which leave all SMs to compute.",
    )
    group.add_argument(
        "--distca-nccl-max-ctas",
        type=int,
        default=MAX_CTAS,
        metavar="N",
        help="Maximum number of thread blocks of an exchange over NCCL: a power of two, at most "
        f"{MOST_CTAS}. Each thread block occupies most of an SM, also while it waits for a late "
        "rank. Use more if links are faster than a network card.",
    )
    group.add_argument(
        "--distca-ablation",
        choices=ABLATIONS,
        default="none",
        help="Only for measurements. single-stream: wait for every exchange where it starts, "
        "so nothing overlaps; signal: send one byte instead of each message, so losses are "
        "meaningless.",
    )
    group.add_argument(
        "--distca-pool-stages",
        action=BooleanOptionalAction,
        default=True,
        help="Let attention servers of all pipeline stages share the tasks of a tick. Off: "
        "only servers of the same stage share them.",
    )
    group.add_argument(
        "--distca-max-in-flight",
        type=int,
        default=None,
        metavar="N",
        help="Maximum number of micro-batches whose activations a pipeline stage holds at a "
        "time. A smaller number needs less memory and more ticks. Default: no limit.",
    )
    group.add_argument(
        "--distca-chain",
        type=int,
        default=1,
        metavar="N",
        help="Number of consecutive micro-batches that share documents. A document may then be "
        "longer than a micro-batch. In pipelines, this allows more and smaller micro-batches, "
        "which leave less idle time and need less memory.",
    )
    group.add_argument(
        "--distca-pool-size",
        type=int,
        default=None,
        metavar="N",
        help="Number of ranks in a server pool: every N neighbouring data-parallel ranks share "
        "attention only with each other. Pools get documents of equal total work, so they may "
        "have different numbers of tokens. Default: no pools; all ranks share attention.",
    )
    group.add_argument(
        "--distca-head-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="Number of neighbouring data-parallel ranks that share the heads of core "
        "attention by all-to-alls (Ulysses) and act as one attention server. These ranks "
        "should be in one node, or fill whole nodes. Default: 1; each rank computes all heads "
        "of its tasks.",
    )
    group.add_argument(
        "--distca-wide-documents",
        type=int,
        default=None,
        metavar="TOKENS",
        help="With --distca-pool-size: documents of at least TOKENS tokens get separate "
        "micro-batches, which all ranks share instead of one pool. Not with pipelines. "
        "Default: pools have all documents.",
    )
    group.add_argument(
        "--distca-token-pairs",
        type=float,
        default=None,
        metavar="PAIRS",
        help="With --distca-pool-size: number of query-key pairs whose attention takes as long "
        "as all other layers take for one token. `distca simulate` prints it. Default: "
        "computed from the number of operations.",
    )
    group.add_argument(
        "--distca-memory-gb",
        type=float,
        default=None,
        metavar="GB",
        help="With --distca-pool-size: maximum memory of a GPU for a training step, as `distca "
        "simulate` predicts memory. If a micro-batch would need more, the global batch gets "
        "more and smaller micro-batches. If that does not suffice, a pipeline holds fewer "
        "micro-batches at a time. If the longest document alone needs more, the run ends at "
        "start. Default: the memory of the smallest GPU; without GPUs, no limit.",
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
        help="First and last iteration of the timeline, counted from 1 when the process "
        "starts. Default: 2 3.",
    )
    group.add_argument(
        "--distca-metrics",
        type=Path,
        default=None,
        metavar="FILE",
        help="Write the figures of each log line as Prometheus metrics, for node_exporter's "
        "textfile collector. The last rank writes the file, whose name should end in .prom. "
        "Also applies without --distca.",
    )
    group.add_argument(
        "--distca-profile",
        type=Path,
        default=None,
        metavar="FILE",
        help="Kernel times from `distca profile`. Plans then balance these times. Default: "
        "plans balance query-key pairs.",
    )
    group.add_argument(
        "--distca-max-document-length",
        type=int,
        default=None,
        metavar="TOKENS",
        help="Maximum length of a document. Longer documents are cut into pieces, which are "
        "shuffled. Default: the window, which is data-parallel size times --seq-length (times "
        "--distca-chain); a resumed run keeps its checkpoint's value. Documents may be longer "
        "than the window only with --distca-pool-size. Also applies without --distca.",
    )
    group.add_argument(
        "--distca-whole-documents",
        action="store_true",
        help="Never cut documents. Whole documents fill packs of --distca-max-document-length "
        "tokens, and padding, which has no loss, fills the rest of a pack. Documents longer "
        "than a pack are refused. If --distca-max-document-length is not given, a pack is a "
        "window, or --seq-length tokens without --distca. --sft always does this.",
    )
    group.add_argument(
        "--distca-share-prefixes",
        action="store_true",
        help="With --sft and --distca: compute tokens that conversations share at their "
        "beginnings only once. The loss is the same as without sharing.",
    )
    group.add_argument(
        "--distca-documents",
        default=None,
        metavar="MODULE:FUNCTION",
        help="Function that returns your documents, instead of --data-path. It is called with "
        "(args, split); the split is train, valid or test. Also applies without --distca.",
    )
    group.add_argument(
        "--from-hf",
        default=None,
        metavar="FOLDER",
        help="Start from a Hugging Face model. Its config.json sets the flags of the "
        "architecture, and the run uses its tokenizer. Its weights are converted once, to "
        "FOLDER.megatron-bfloat16 (or -float32). If --load has a checkpoint, the run continues "
        "from the checkpoint instead. Also applies without --distca.",
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
