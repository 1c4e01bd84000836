"""Which prompts the scheduler's half of vLLM's connector asks the prefill ranks for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: launch/test.sh --vllm")

from distca.vllm import connector
from distca.vllm.settings import Settings
from distca.vllm.stats import Tally

LEAST, CAPACITY = 100, 9999


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch) -> connector._Asks:
    """The scheduler's half, with ranks that are there."""
    ranks = SimpleNamespace(ready=True, welcome=SimpleNamespace(capacity=CAPACITY), poll=list)
    monkeypatch.setattr(connector, "PrefillClient", lambda *_: ranks)
    monkeypatch.setattr(connector, "engine_facts", lambda _: {})
    config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id="test"))
    return connector._Asks(config, Settings("tcp://127.0.0.1:1", LEAST), Tally())


def hashes(tokens: list[int]) -> list[bytes]:
    """Hashes of blocks of 16 tokens, as vLLM makes them: each is also one of all blocks before."""
    return [repr(tokens[:end]).encode() for end in range(16, len(tokens) + 1, 16)]


def a_request(length: int = 500, **changes: Any) -> Any:
    """A request of vLLM."""
    tokens = list(range(length))
    values: dict[str, Any] = {
        "request_id": "one",
        "num_tokens": length,
        "all_token_ids": tokens,
        "prompt_token_ids": tokens,
        "block_hashes": hashes(tokens),
        "num_preemptions": 0,
        "pooling_params": None,
        "skip_reading_prefix_cache": False,
        "lora_request": None,
        "mm_features": [],
        "cache_salt": None,
        "priority": 0,
    }
    return SimpleNamespace(**values | changes)


@pytest.mark.parametrize(
    ("length", "computed", "asked"),
    [
        (LEAST - 1, 0, 0),
        # vLLM computes the last token itself.
        (LEAST, 0, LEAST - 1),
        (500, 500 - LEAST, LEAST - 1),
        (500, 501 - LEAST, 0),
        (CAPACITY + 1, 0, CAPACITY),
        (CAPACITY + 2, 0, 0),
    ],
)
def test_prompts_are_asked_for_by_the_tokens_that_vllm_has_not(
    asks: connector._Asks, length: int, computed: int, asked: int
) -> None:
    assert asks.wanted(a_request(length), computed) == asked


def test_of_a_prompt_of_one_token_nothing_is_asked_for(asks: connector._Asks) -> None:
    asks._least = 1
    assert asks.wanted(a_request(1), 0) == 0
    assert asks.wanted(a_request(2), 0) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        # Of prompt_logprobs and prompt_logprob_token_ids.
        ({"skip_reading_prefix_cache": True}, "prompt_logprobs"),
        ({"pooling_params": object()}, "pooling"),
        ({"lora_request": object()}, "lora"),
        ({"mm_features": [object()]}, "multimodal"),
        ({"prompt_token_ids": None}, "prompt_embeds"),
        ({"prompt_embeds": object()}, "prompt_embeds"),
    ],
)
def test_what_ranks_do_not_compute_is_declined_once(
    asks: connector._Asks, changes: dict[str, Any], reason: str
) -> None:
    for _ in range(2):
        assert asks.wanted(a_request(**changes), 0) == 0
    assert asks._tally.take().data["declined"] == {reason: 1}
    assert asks.wanted(a_request(request_id="two"), 0) == 499


def test_a_prompt_is_asked_for_again_after_vllm_preempted_it_and_not_after_a_failure(
    asks: connector._Asks,
) -> None:
    request = a_request()
    assert asks.wanted(request, 0) == 499
    asks.begin(request, ([0, 1],), 499)
    asks.ended(["one"])
    # It failed, and vLLM wants to know once more.
    assert asks.wanted(request, 0) == 0
    request.num_preemptions = 1
    assert asks.wanted(request, 0) == 499
    asks.begin(request, ([2, 3],), 499)
    assert asks.wanted(request, 0) == 0
    assert [load.blocks for load in asks.take(idle=False).begin] == [([0, 1],), ([2, 3],)]


def test_a_prompt_that_comes_for_one_request_is_not_asked_for_by_another(
    asks: connector._Asks,
) -> None:
    first, again = a_request(), a_request(request_id="again")
    asks.begin(first, ([0, 1],), asks.wanted(first, 0) or 0)
    assert asks.wanted(again, 0) is None
    # It need not wait for one that is much longer, and would have to ask after a shorter one.
    for length in (640, 380):
        assert asks.wanted(a_request(length, request_id="begins alike"), 0) == length - 1
    assert asks.wanted(a_request(590, request_id="nearly"), 0) is None
    tokens = [7, *range(499)]
    other = a_request(request_id="other", block_hashes=hashes(tokens))
    assert asks.wanted(other, 0) == 499
    assert asks.wanted(a_request(request_id="uncached", block_hashes=[]), 0) == 499
    asks.ended(["one"])
    assert asks.wanted(again, 0) == 499
    assert asks.wanted(again, 496) == 0


def test_a_request_asks_itself_once_the_first_one_has_gone(asks: connector._Asks) -> None:
    first, again = a_request(), a_request(request_id="again")
    asks.begin(first, ([0, 1],), 499)
    assert asks.wanted(again, 0) is None
    asks.forget("one")
    assert asks.take(idle=False).cancel == [0]
    assert asks.wanted(again, 0) == 499


def test_steps_without_loads_tell_one_and_the_same_nothing(asks: connector._Asks) -> None:
    for idle in (False, True):
        nothing = asks.take(idle=idle)
        assert nothing == connector.Loads(idle=idle)
        assert asks.take(idle=idle) is nothing
    assert asks.wanted(a_request(LEAST - 1), 0) == 0
    assert asks.take(idle=False) is asks.take(idle=False)


def test_counts_are_taken_once(asks: connector._Asks) -> None:
    assert asks._tally.take() is None
    asks.wanted(a_request(LEAST - 1), 0)
    taken = asks._tally.take()
    assert taken is not None
    assert asks._tally.take() is None
    asks.wanted(a_request(LEAST - 1, request_id="two"), 0)
    for found in (taken, asks._tally.take()):
        assert found.data["declined"] == {"short": 1}


def test_layers_do_not_call_the_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.model_executor.layers.attention import attention, kv_transfer_utils

    def fail(*args: object) -> None:
        raise AssertionError(f"called with {args}")

    of_worker = object.__new__(connector.DistCAConnector)
    of_worker.bind_connector_metadata(connector.Loads())
    for name in ("wait_for_layer_load", "save_kv_layer"):
        monkeypatch.setattr(connector.DistCAConnector, name, fail)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", of_worker)
    monkeypatch.setattr(attention, "get_attention_context", lambda _: ({}, None, None, None))

    def layer(layer_name: str) -> str:
        return layer_name

    assert kv_transfer_utils.maybe_transfer_kv_layer(layer)("one") == "one"
