"""What one rank records of inference: each step's plans, logits, bytes and order of events."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from recording.hooks import saved_plan, watch_exchanges
from recording.log import Log, bits, digest


@contextlib.contextmanager
def watching_steps(log: Log, steps: list[dict[str, Any]]) -> Iterator[None]:
    """Notes what this process does inside, step by step.

    Args:
        log: takes the events.
        steps: is given each step when it ends.
    """
    from distca.inference.model_runner import ModelRunner
    from distca.runtime.serving.kv_pool import KVCache

    added: dict[tuple[int, int], list[int]] = {}

    def add_blocks(_: Log, original: Any, rank: Any, sequence: int, blocks: Any) -> None:
        added.setdefault((sequence, rank.rank), []).extend(blocks)
        original(rank, sequence, blocks)

    def drop(_: Log, original: Any, rank: Any, sequence: int) -> None:
        added.pop((sequence, rank.rank), None)
        original(rank, sequence)

    def run(_: Log, original: Any, rank: Any, step: Any, tokens: Any, *args: Any) -> Any:
        before = log.take()
        logits = original(rank, step, tokens, *args)
        steps.append(
            {
                "before": before,
                "fed": {str(number): list(ids) for number, ids in sorted(tokens.items())},
                "plans": [_of_part(part) for part in step.parts],
                "new blocks": sorted([*key, *blocks] for key, blocks in added.items()),
                "logits": {str(number): bits(row) for number, row in sorted(logits.items())},
                **log.take(),
            }
        )
        added.clear()
        return logits

    def write(_: Log, original: Any, pool: Any, layer: int, slots: Any, k: Any, v: Any) -> Any:
        log.event(f"layer {layer}: {len(slots)} rows are written")
        log.note("keys and values", f"{bits(k)} {bits(v)}")
        return original(pool, layer, slots, k, v)

    with watch_exchanges(log) as wrap:
        wrap(ModelRunner, "add_blocks", add_blocks)
        wrap(ModelRunner, "drop", drop)
        wrap(ModelRunner, "run", run)
        wrap(KVCache, "write", write)
        yield
    steps.append(log.take())


def _of_part(part: Any) -> dict[str, Any]:
    """A part of a step: who is fed, and hashes of what is planned."""
    found: dict[str, Any] = {"sequences": list(part.sequences), "before": part.before.tolist()}
    plans = getattr(part, "plans", None)
    if plans is None:
        hidden = {str(mask.window_left): rows.tolist() for mask, rows in part.hidden.items()}
        return found | {"positions": part.positions.tolist(), "owners": part.owners.tolist(),
                        "hidden": hidden}  # fmt: skip
    by_mask = {str(mask.window_left): _hash(plan) for mask, plan in plans.by_mask.items()}
    sparse = {str(layer): _hash(plan) for layer, plan in plans.sparse.items()}
    return found | {"by window": by_mask, "by layer": sparse}


def _hash(stepped: Any) -> str:
    """A hash of a plan in steps."""
    kept = () if stepped.kept is None else (stepped.kept.q, stepped.kept.kv)
    arrays = b"".join(np.ascontiguousarray(each).tobytes() for each in (stepped.step, *kept))
    rest = f"{saved_plan(stepped.plan)} {stepped.relays} {stepped.gathers}".encode()
    return digest(arrays + rest)


def record_engine(settings: Any, blocks: int, submits: list[Any], aborts: int) -> dict[str, Any]:
    """Answers sequences by the engine and records this rank's part; collective."""
    from msgspec import to_builtins

    from support.engines import run_on_a_rank

    log, steps = Log(), list[dict[str, Any]]()
    with watching_steps(log, steps):
        answered = run_on_a_rank(settings, blocks, submits, aborts, seed=3)
    return {
        "steps": steps,
        "tokens": {str(number): ids for number, ids in sorted(answered.tokens.items())},
        "scores": to_builtins(answered.scores, str_keys=True),
        "bytes": answered.planned,
        "blocks moved": answered.moved,
        "blocks at the end": answered.ranks,
    }


def record_turns(how: tuple[Any, ...]) -> dict[str, Any]:
    """Answers turns of conversations by an `LLM` and records this rank's part; collective."""
    from support.generated import generate_on_a_rank

    log, steps = Log(), list[dict[str, Any]]()
    with watching_steps(log, steps):
        found = generate_on_a_rank(*how)
    told = [{str(n): each.token_ids for n, each in sorted(turn.items())} for turn in found.turns]
    return {"steps": steps, "tokens": told, "bytes": {"planned": found.planned, "sent": found.sent},
            "blocks at the end": found.referenced}  # fmt: skip
