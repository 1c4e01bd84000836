"""vLLM's connector to prefill ranks: long prompts are computed there, everything else by vLLM.

vLLM makes two of them. The one of its scheduler chooses the prompts that are asked for. The one of
each worker asks for them, and writes the rows that come into vLLM's blocks, between two of vLLM's
steps. If rows are missing in the end, vLLM computes the prompt itself.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.models.utils import extract_layer_index

from distca.plan.span import Int64s
from distca.prefill.client import PrefillClient
from distca.prefill.messages import Hello
from distca.schedule.serving.handoff.protocol import Transfer
from distca.vllm.settings import Settings, checked_settings, engine_facts
from distca.vllm.stats import PrefillMetrics, PrefillStats, Tally

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.distca")

_IDLE_SECONDS = 0.01
"""Seconds that a worker waits for rows where vLLM has nothing else to do."""

_NO_BLOCK = 0
"""What vLLM has in place of blocks that a layer's window has left."""


@dataclass(frozen=True)
class Load:
    """A prompt whose keys and values are asked for.

    Attributes:
        number: number that no other load of this engine has.
        request: vLLM's name of the request.
        tokens: token ids whose keys and values are wanted, and those before them.
        start: first position that is wanted.
        blocks: vLLM's blocks of each group of layers, from the first position of the prompt on.
        priority: requests of a lower number come first.
        salt: only requests of the same salt share keys and values.
    """

    number: int
    request: str
    tokens: list[int]
    start: int
    blocks: tuple[list[int], ...]
    priority: int
    salt: bytes


@dataclass(frozen=True)
class Loads(KVConnectorMetadata):
    """What the scheduler's connector tells the workers' with a step.

    Attributes:
        begin: loads that begin.
        cancel: numbers of loads whose requests have ended.
        idle: whether the step computes nothing.
    """

    begin: Sequence[Load] = ()
    cancel: Sequence[int] = ()
    idle: bool = False


_NOTHING = {idle: Loads(idle=idle) for idle in (False, True)}
"""What the workers receive with most steps."""


class DistCAConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module.

    Raises:
        ValueError: the settings cannot be used, or the prefill ranks have another model.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings, scheduler = checked_settings(vllm_config), role == KVConnectorRole.SCHEDULER
        tally = self._tally = Tally()
        self._asks = _Asks(vllm_config, settings, tally) if scheduler else None
        self._loads = None if scheduler else _Writes(vllm_config, settings, kv_cache_config, tally)

    # Of vLLM's scheduler.

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Says how many tokens behind those that vLLM has are loaded; 0: it computes them, None: it
        shall ask again later."""
        assert self._asks is not None
        wanted = self._asks.wanted(request, num_computed_tokens)
        return wanted, bool(wanted)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Takes the blocks of a request that is loaded."""
        assert self._asks is not None
        if num_external_tokens:
            self._asks.begin(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Loads:
        """Tells workers what to load."""
        assert self._asks is not None
        return self._asks.take(idle=not scheduler_output.total_num_scheduled_tokens)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Takes in which loads have ended."""
        assert self._asks is not None
        self._asks.ended(connector_output.finished_recving or ())

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, object] | None]:
        """Takes in that a request has ended. Nothing reads its blocks."""
        assert self._asks is not None
        self._asks.forget(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, object] | None]:
        """Does the same where vLLM keeps layers of different windows in groups of blocks."""
        return self.request_finished(request, block_ids[0])

    # Of both.

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Says that nothing happens inside of layers.

        With CUDA graphs vLLM asks for it before it starts processes and loads the model. So wrong
        settings are refused by then.

        Raises:
            ValueError: a setting cannot be used.
        """
        Settings.of(extra_config)
        return False

    def get_kv_connector_stats(self) -> PrefillStats | None:
        """Returns what was counted since the last call."""
        return self._tally.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PrefillStats:
        """Returns counts that another process has sent."""
        return PrefillStats(data)

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> PrefillMetrics:
        """Returns the metrics that `/metrics` shows."""
        return PrefillMetrics(*args)

    # Of vLLM's workers.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Takes the blocks of each layer, and connects to the prefill ranks."""
        assert self._loads is not None
        self._loads.connect(kv_caches)

    def has_connector_metadata(self) -> bool:
        """Says that layers have nothing to load or to save: vLLM calls no connector in them."""
        return False

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: object) -> None:
        """Begins the loads of a step."""
        assert self._loads is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        self._loads.take(metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Writes what has come; returns the requests whose loads have ended, or failed."""
        assert self._loads is not None
        return self._loads.ended()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: requests run once all of their layers are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: object
    ) -> None:
        """Does nothing: no keys and values leave vLLM."""

    def wait_for_save(self) -> None:
        """Does nothing: no keys and values leave vLLM."""

    def shutdown(self) -> None:
        """Ends the connections."""
        if self._loads is not None:
            self._loads.close()
        if self._asks is not None:
            self._asks.close()


class _Asks:
    """The scheduler's half: which prompts are asked for.

    Args:
        config: vLLM's configuration.
        settings: settings of the connector.
        tally: counts for vLLM.
    """

    def __init__(self, config: VllmConfig, settings: Settings, tally: Tally) -> None:
        self._least = settings.min_tokens
        name = f"{config.kv_transfer_config.engine_id}, scheduler"
        # It asks for nothing, but knows whether the ranks work.
        hello = Hello(engine_facts(config), name)
        self._client = PrefillClient(
            settings.address, hello, 1, torch.float32, lambda *_: None, "tcp"
        )
        self._next = 0
        self._begun: list[Load] = []
        self._cancelled: list[int] = []
        # For each load its number, and vLLM's hashes of its blocks: a hash is that of all blocks
        # before as well.
        self._under_way: dict[str, tuple[int, list[bytes]]] = {}
        # Requests that are or were loaded, with how often vLLM had preempted them then; and those
        # that vLLM computes itself.
        self._asked: dict[str, int] = {}
        self._declined: set[str] = set()
        self._tally = tally

    def wanted(self, request: Request, computed: int) -> int | None:
        """Tokens of a request that are asked for; 0: vLLM computes it, None: they come already."""
        name = request.request_id
        if self._asked.get(name) == request.num_preemptions:
            # After a failure vLLM asks again, and computes the prompt itself. One that it has
            # preempted since lost what was loaded, and is loaded again.
            return 0
        # The last token is vLLM's in any case: the one that follows is chosen by it.
        count = request.num_tokens - 1 - computed
        reason = self._why_not(request, count)
        if reason is None:
            self._declined.discard(name)
            # Of several answers to a prompt, the others find it in vLLM's cache once it is there.
            return None if self._comes(request) else int(count)
        # vLLM asks again for a request that found no room.
        if name not in self._declined:
            self._declined.add(name)
            self._tally.counts.decline(reason)
        return 0

    def _comes(self, request: Request) -> bool:
        """Whether the same prompt comes for another request, but for less than is asked for."""
        hashes = request.block_hashes
        for _, others in self._under_way.values():
            if equal := _equal_blocks(hashes, others):
                rest = max(len(hashes), len(others)) - equal
                if rest * (request.num_tokens // len(hashes)) < self._least:
                    return True
        return False

    def _why_not(self, request: Request, count: int) -> str | None:
        """Why vLLM computes the last `count` tokens of a request itself; None: it does not."""
        if count < max(self._least - 1, 1):
            return "short"
        self._client.poll()
        welcome = self._client.welcome
        if welcome is None or not self._client.ready:
            return "unreachable"
        if request.num_tokens - 1 > welcome.capacity:
            return "too long"
        if request.pooling_params is not None:
            return "pooling"
        if request.skip_reading_prefix_cache:
            # Logits of all tokens are wanted, which nobody but vLLM computes.
            return "prompt_logprobs"
        if request.lora_request is not None:
            return "lora"
        if request.mm_features:
            return "multimodal"
        if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
            return "prompt_embeds"
        return None

    def begin(self, request: Request, blocks: tuple[list[int], ...], count: int) -> None:
        """Asks for the last `count` tokens of a request before its last one."""
        name = request.request_id
        self._asked[name] = request.num_preemptions
        self._tally.counts.ask(count)
        tokens = list(request.all_token_ids)[: request.num_tokens - 1]
        salt = (request.cache_salt or "").encode()
        start = len(tokens) - count
        load = Load(self._next, name, tokens, start, blocks, request.priority, salt)
        self._begun.append(load)
        self._under_way[name] = self._next, list(request.block_hashes)
        self._next += 1

    def take(self, idle: bool) -> Loads:
        """Returns what workers receive with the next step."""
        if not (self._begun or self._cancelled):
            return _NOTHING[idle]
        loads = Loads(self._begun, self._cancelled, idle)
        self._begun, self._cancelled = [], []
        return loads

    def ended(self, requests: Iterable[str]) -> None:
        """Notes loads that have ended."""
        for name in requests:
            self._under_way.pop(name, None)

    def forget(self, name: str) -> None:
        """Notes that a request has ended, and cancels its load."""
        self._asked.pop(name, None)
        self._declined.discard(name)
        load = self._under_way.pop(name, None)
        if load is not None:
            self._cancelled.append(load[0])

    def close(self) -> None:
        self._client.close()


def _equal_blocks(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    """How many blocks two prompts have in common, by hashes that are those of all blocks before."""
    return bisect_left(range(min(len(a), len(b))), True, key=lambda n: a[n] != b[n])


class _Writes:
    """A worker's half: rows go into vLLM's blocks.

    Args:
        config: vLLM's configuration.
        settings: settings of the connector.
        kept: vLLM's groups of layers. Each group has its own blocks.
        tally: counts for vLLM.
    """

    def __init__(
        self, config: VllmConfig, settings: Settings, kept: KVCacheConfig, tally: Tally
    ) -> None:
        self._config, self._settings, self._tally = config, settings, tally
        # For each group of layers tokens of a block.
        self._sizes = [each.kv_cache_spec.block_size for each in kept.kv_cache_groups]
        self._group_of = {
            extract_layer_index(name): number
            for number, each in enumerate(kept.kv_cache_groups)
            for name in each.layer_names
        }
        self._layers: dict[int, tuple[Any, torch.Tensor]] = {}
        self._loads: dict[Transfer, Load] = {}
        self._blocks: dict[Transfer, list[torch.Tensor]] = {}
        self._client: PrefillClient | None = None
        self._idle = False
        self._begun: dict[Transfer, float] = {}
        # Each worker of a tensor-parallel engine loads a part of the same prompts.
        self._counts = False

    def connect(self, caches: dict[str, torch.Tensor]) -> None:
        """Takes the blocks of each layer, and waits for the ranks.

        Raises:
            HandshakeError: they have another model.
        """
        layers = self._config.compilation_config.static_forward_context
        self._layers = {extract_layer_index(name): (layers[name], caches[name]) for name in caches}
        model, parallel = self._config.model_config, self._config.parallel_config
        size, whole = parallel.tensor_parallel_size, model.get_total_num_kv_heads()
        heads, rank = model.get_num_kv_heads(parallel), get_tensor_model_parallel_rank()
        self._counts = rank == 0
        # All workers have all of a latent.
        first = 0 if model.use_mla else rank * whole // size
        hello = Hello(
            engine_facts(self._config),
            self._config.kv_transfer_config.engine_id,
            rank,
            size,
            "",
            first,
            heads,
        )
        dim, dtype = model.get_head_size(), model.dtype
        settings, device = self._settings, next(iter(caches.values())).device
        client = self._client = PrefillClient(
            settings.address,
            hello,
            dim,
            dtype,
            self._write,
            settings.transfer,
            device,
            settings.landing_bytes,
            self._say_who_is_there,
        )
        if not client.connect(settings.connect_seconds):
            logger.warning(
                "DistCA: nobody answers at %s: vLLM computes all prompts until `distca prefill` "
                "runs there",
                settings.address,
            )

    def _say_who_is_there(self, client: PrefillClient) -> None:
        logger.info(
            "DistCA: connected to the prefill ranks at %s; rows come by %s",
            self._settings.address,
            client.comes_by,
        )

    def take(self, loads: Loads) -> None:
        """Begins and cancels loads."""
        assert self._client is not None, "layers come first"
        self._idle = loads.idle
        for number in loads.cancel:
            self._client.cancel(Transfer(number))
        for load in loads.begin:
            transfer = Transfer(load.number)
            self._loads[transfer] = load
            self._blocks[transfer] = [torch.tensor(each, dtype=torch.int64) for each in load.blocks]
            self._begun[transfer] = time.monotonic()
            self._client.begin(transfer, load.tokens, load.start, load.priority, load.salt)

    def ended(self) -> KVConnectorTransferResults:
        """Writes what has come; returns requests whose loads have ended, and which have failed."""
        results = KVConnectorTransferResults()
        # Most of vLLM's steps have nothing to load, and should cost nothing here.
        if self._client is None or (self._client.idle and not self._loads):
            return results
        for each in self._client.poll(_IDLE_SECONDS if self._idle and self._loads else 0.0):
            load = self._loads.pop(each.transfer)
            del self._blocks[each.transfer]
            results.finished_recving.add(load.request)
            if self._counts:
                seconds = time.monotonic() - self._begun[each.transfer]
                self._tally.counts.end(each.outcome, len(load.tokens) - load.start, seconds)
            del self._begun[each.transfer]
            if each.outcome == "failed":
                logger.warning("DistCA: %s is not loaded: %s", load.request, each.failure)
                results.failed_recving.add(load.request)
        return results

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _write(
        self, transfer: Transfer, layer: int, at: Int64s, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Writes rows into blocks, whatever layout they have: by the layer's own backend."""
        self._tally.counts.receive(keys.nbytes + values.nbytes)
        (module, cache), group = self._layers[layer], self._group_of[layer]
        positions, size = torch.from_numpy(at), self._sizes[group]
        blocks = self._blocks[transfer][group][positions // size]
        slots, kept = blocks * size + positions % size, blocks != _NO_BLOCK
        if not kept.all():
            # The layer's window has left the others.
            slots, keys, values = slots[kept], keys[kept], values[kept]
        if not len(slots):
            return
        keys, values = (each.to(cache.device) for each in (keys, values))
        slots = slots.to(cache.device)
        if isinstance(module, MLAAttention):
            # What is rotated lies behind the latent.
            rank, dtype, scale = module.kv_lora_rank, module.kv_cache_dtype, module._k_scale
            latents, rotated = keys[:, 0, :rank], keys[..., rank:]
            module.impl.do_kv_cache_update(latents, rotated, cache, slots, dtype, scale)
        else:
            module.impl.do_kv_cache_update(module, keys, values, cache, slots)
