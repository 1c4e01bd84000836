"""What the `--distca` flags say, as one value that is made of Megatron-LM's parsed arguments.

After parsing nothing else reads these flags: functions take a `DistcaConfig`, or the part of it
that they need.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from distca.cost.latent_rows import LatentRows
from distca.cost.link import Links
from distca.cost.volume import BackwardInputs
from distca.schedule import ExecutionOptions
from distca.schedule.program import Ablation
from distca.transport.collective import MAX_CTAS
from distca.transport.nvshmem import Mode
from megatron_patches.flags.numbers import check_numbers


@dataclass(frozen=True)
class TransportConfig:
    """Choice of what moves rows.

    Attributes:
        kind: auto, collective, shm or nvshmem.
        nvshmem_mode: what nvshmem copies by.
        nccl_max_ctas: most thread blocks of an exchange over NCCL.
        ablation: what measurements leave out; none: nothing.
    """

    kind: str = "collective"
    nvshmem_mode: Mode = "kernel"
    nccl_max_ctas: int = MAX_CTAS
    ablation: Ablation = "none"

    def check(self) -> None:
        """Checks the values against each other.

        Raises:
            ValueError: the message says what to do.
        """
        if self.nvshmem_mode != "kernel" and self.kind in ("collective", "shm"):
            raise ValueError(
                f"--distca-nvshmem-mode {self.nvshmem_mode} says how nvshmem copies, but "
                f"--distca-transport is {self.kind}: remove one of the two"
            )
        blocks = self.nccl_max_ctas
        if blocks & (blocks - 1):
            raise ValueError(
                f"--distca-nccl-max-ctas {blocks} is not a power of two, and NCCL rounds it up: "
                "use 8, or 16 where the GPUs of one machine exchange most"
            )


@dataclass(frozen=True)
class DocumentsConfig:
    """Choice of the documents, and how they are cut; applies without `--distca`, too.

    Attributes:
        max_length: most tokens of a piece of a document, or of a pack of whole ones; None: those
            of a window.
        whole: whether documents stay whole, in packs.
        function: `MODULE:FUNCTION` that gives the documents; None: Megatron-LM's flags name files.
        conversations: whether files hold conversations (`--sft`).
        share_prefixes: whether conversations hold the tokens they share once.
    """

    max_length: int | None = None
    whole: bool = False
    function: str | None = None
    conversations: bool = False
    share_prefixes: bool = False

    def __post_init__(self) -> None:
        if self.share_prefixes and not self.conversations:
            raise ValueError(
                "--distca-share-prefixes finds what conversations share: add --sft, or remove it"
            )
        if self.conversations and self.function is not None:
            raise ValueError(
                "--sft reads --data-path, but --distca-documents gives other documents: remove one"
            )


@dataclass(frozen=True)
class SchedulingConfig:
    """Choice of the scheduler, and what binds it.

    Attributes:
        scheduler: name of the scheduler.
        free_placement: whether the scheduler chooses where documents lie.
        tolerance: fraction by which a server's load may exceed the mean.
        max_buffer_bytes: most bytes that a server receives for a layer; None: no bound.
        server_speeds: relative speed of each server; None: all are equal.
        context_parallel_size: ranks that share documents in the baselines; None: as few as needed.
        pool_stages: whether the servers of all pipeline stages share tasks.
        max_in_flight: most micro-batches whose activations a stage keeps; None: no bound.
        profile: file of measured kernel times; None: loads are pair counts.
        gpus_per_node: GPUs that share a node.
        node_gb_per_s: speed of links inside a node, GB/s of a GPU and direction.
        network_gb_per_s: speed of links between nodes, GB/s of a GPU and direction.
    """

    scheduler: str = "tiles"
    free_placement: bool = True
    tolerance: float = 0.1
    max_buffer_bytes: int | None = None
    server_speeds: tuple[float, ...] | None = None
    context_parallel_size: int | None = None
    pool_stages: bool = True
    max_in_flight: int | None = None
    profile: Path | None = None
    gpus_per_node: int = 1
    node_gb_per_s: float = 450.0
    network_gb_per_s: float = 50.0

    def links(self, server_gpus: int) -> Links:
        """Returns the links between servers of as many GPUs, which share heads."""
        return Links(
            max(1, self.gpus_per_node // server_gpus),
            self.node_gb_per_s,
            self.network_gb_per_s,
        )

    def check(self) -> None:
        """Checks the values against each other.

        Raises:
            ValueError: the message says what to do.
        """
        for flag, value in (
            ("max-buffer-bytes", self.max_buffer_bytes),
            ("server-speeds", self.server_speeds),
        ):
            if value is not None and self.scheduler != "tiles":
                raise ValueError(
                    f"--distca-{flag} works only with the scheduler tiles, not {self.scheduler}: "
                    "remove one of the two"
                )
        if self.profile is not None and not self.profile.is_file():
            raise ValueError(
                f"--distca-profile {self.profile} does not exist: make one with `distca profile "
                f"--output {self.profile}`"
            )


@dataclass(frozen=True)
class TraceConfig:
    """Choice of the iterations on a timeline.

    Attributes:
        path: file of the timeline.
        first: first iteration, counted from 1 in a process.
        last: last iteration.
    """

    path: Path
    first: int = 2
    last: int = 3


@dataclass(frozen=True)
class DistcaConfig:
    """What the `--distca` flags say.

    Attributes:
        enabled: whether core attention is disaggregated (`--distca`); else only `documents`,
            `metrics` and `chain` apply.
        documents: documents of the run.
        scheduling: scheduler.
        transport: what moves rows.
        trace: timeline, or None.
        metrics: file of Prometheus' metrics, also of a run without `--distca`, or None.
        dedicated: processes at the end of the job that only serve.
        backward: whether the backward pass sends the kernels' inputs again (`resend`), or servers
            keep them (`keep`).
        latent_rows: whether latents travel for keys and values: `auto`, `on` or `off`.
        ping_pong: whether a micro-batch runs as two nano-batches.
        cuda_graphs: whether layers are replayed as CUDA graphs.
        sm_margin: multiprocessors that attention kernels leave to exchanges.
        chain: number of micro-batches in turn that share documents.
        pool_size: data-parallel ranks of a server pool, or None.
        wide_documents: tokens from which on all ranks share a document, with server pools; None:
            they share none.
        head_parallel: neighbouring data-parallel ranks that share heads, and are one server.
        token_pairs: visible pairs that take as long as a token's linear layers, by which pools are
            balanced; None: those of equally many operations.
        memory_gb: most GB of a GPU that a step may need, with server pools; None: those it has.
    """

    enabled: bool = False
    documents: DocumentsConfig = DocumentsConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    transport: TransportConfig = TransportConfig()
    trace: TraceConfig | None = None
    metrics: Path | None = None
    dedicated: int = 0
    backward: BackwardInputs = "resend"
    latent_rows: LatentRows = "auto"
    ping_pong: bool = True
    cuda_graphs: bool = False
    sm_margin: int = 0
    chain: int = 1
    pool_size: int | None = None
    wide_documents: int | None = None
    head_parallel: int = 1
    token_pairs: float | None = None
    memory_gb: float | None = None

    @property
    def shares_tokens_unevenly(self) -> tuple[str, str] | None:
        """The flag by which ranks may own different numbers of tokens, and what to do without it;
        None: all own equally many."""
        if self.pool_size is not None:
            return f"--distca-pool-size {self.pool_size}", "remove it"
        if self.scheduling.scheduler == "wlb-llm" and self.scheduling.free_placement:
            return "--distca-scheduler wlb-llm", "add --distca-placement sequential"
        return None

    def __post_init__(self) -> None:
        if self.enabled:
            self.scheduling.check()
            self.transport.check()

    @classmethod
    def from_args(cls, args: Namespace, processes_per_node: int = 1) -> DistcaConfig:
        """Makes the value of Megatron-LM's parsed arguments, once all numbers are in range.

        Args:
            args: the arguments.
            processes_per_node: GPUs of a node where no flag says how many.

        Raises:
            ValueError: a number of theirs or ours is out of range, or two values do not go
                together.
        """
        check_numbers(args)
        speeds, trace = args.distca_server_speeds, args.distca_trace
        return cls(
            enabled=args.distca,
            documents=DocumentsConfig(
                max_length=args.distca_max_document_length,
                whole=args.distca_whole_documents or args.sft,
                function=args.distca_documents,
                conversations=args.sft,
                share_prefixes=args.distca_share_prefixes,
            ),
            scheduling=SchedulingConfig(
                scheduler=args.distca_scheduler,
                free_placement=args.distca_placement == "free",
                tolerance=args.distca_tolerance,
                max_buffer_bytes=args.distca_max_buffer_bytes,
                server_speeds=None if speeds is None else tuple(speeds),
                context_parallel_size=args.distca_context_parallel_size,
                pool_stages=args.distca_pool_stages,
                max_in_flight=args.distca_max_in_flight,
                profile=args.distca_profile,
                gpus_per_node=args.distca_gpus_per_node or processes_per_node,
                node_gb_per_s=args.distca_node_gb_per_s,
                network_gb_per_s=args.distca_network_gb_per_s,
            ),
            transport=TransportConfig(
                kind=args.distca_transport,
                nvshmem_mode=args.distca_nvshmem_mode,
                nccl_max_ctas=args.distca_nccl_max_ctas,
                ablation=args.distca_ablation,
            ),
            trace=None if trace is None else TraceConfig(trace, *args.distca_trace_iterations),
            metrics=args.distca_metrics,
            dedicated=args.distca_servers if args.distca else 0,
            backward=args.distca_backward,
            latent_rows=args.distca_latent_rows,
            ping_pong=args.distca_ping_pong,
            cuda_graphs=args.distca_cuda_graphs,
            sm_margin=args.distca_sm_margin,
            chain=args.distca_chain,
            pool_size=args.distca_pool_size,
            wide_documents=args.distca_wide_documents,
            head_parallel=args.distca_head_parallel_size,
            token_pairs=args.distca_token_pairs,
            memory_gb=args.distca_memory_gb,
        )

    def execution_options(self, chunks: int) -> ExecutionOptions:
        """Returns how global batches of training run.

        Args:
            chunks: number of model chunks of each pipeline stage.
        """
        return ExecutionOptions(
            scheduler=self.scheduling.scheduler,
            free_placement=self.scheduling.free_placement,
            ping_pong=self.ping_pong,
            pool_stages=self.scheduling.pool_stages,
            chunks=chunks,
            max_in_flight=self.scheduling.max_in_flight,
            chain=self.chain,
            pool_size=None if self.pool_size is None else self.pool_size // self.head_parallel,
            wide_documents=self.wide_documents,
            token_pairs=self.token_pairs,
        )
