"""Plans as files, in JSON that any program can read and check.

    {"format": 1,
     "documents": [length, ...],
     "placement": [[[document, start, end], ...], ...],      a list for each rank, in row order
     "tasks": [[document, q_start, q_end, kv_start, kv_end, server], ...],
                                                             each with its step, if not all are 0
     "kept": [[[queries, keys] of each key-value head, ...] of each task, ...],
                                                             only if tasks may drop rows
     "first_query": [position, ...],                         only if there are cached prefixes
     "parents": [document or -1, ...],                       only if documents share prefixes
     "query_shift": [tokens, ...],                           only if some see all of themselves
     "configuration": {"scheduler": ..., "window_left": ..., "block": ..., "notes": [...], ...}}

`configuration` may have further entries that say what the plan was made for.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from distca.json_files import read_text
from distca.plan.mask import Mask
from distca.plan.placement import Placement
from distca.plan.plan import Plan
from distca.plan.span import Int64s
from distca.plan.stepped import KeptRows, SteppedPlan
from distca.plan.tasks import Tasks
from distca.plan.validate import validate_stepped_plan
from distca.whole_file import write_text

FORMAT = 1
_TASK_COLUMNS = 6


def save_plan(
    plan: Plan | SteppedPlan, path: Path, configuration: dict[str, object] | None = None
) -> None:
    """Writes a plan to a file.

    Args:
        plan: the plan.
        path: file to write, replaced if it exists.
        configuration: JSON values that say what the plan was made for; saved beside its own.
    """
    stepped = plan if isinstance(plan, SteppedPlan) else SteppedPlan.at_once(plan)
    plan = stepped.plan
    placement, t = plan.placement, plan.tasks
    pieces: list[list[list[int]]] = [[] for _ in range(placement.world_size)]
    columns = (placement.rank, placement.document, placement.start, placement.end)
    for rank, *piece in zip(*(column.tolist() for column in columns), strict=True):
        pieces[rank].append(piece)
    table = [t.document, t.q_start, t.q_end, t.kv_start, t.kv_end, t.server]
    tasks = np.stack([*table, stepped.step] if stepped.steps > 1 else table, axis=1)
    own = {
        "scheduler": plan.scheduler,
        "window_left": plan.mask.window_left,
        "block": plan.block,
        "notes": list(plan.notes),
    }
    if plan.mask.attention_chunk is not None:
        own["attention_chunk"] = plan.mask.attention_chunk
    if stepped.gathers:
        own["gathers"] = True
    if plan.head_groups > 1:
        own["head_groups"] = plan.head_groups
    if not stepped.relays:
        own["relays"] = False
    saved = {
        "format": FORMAT,
        "documents": plan.lengths.tolist(),
        "placement": pieces,
        "tasks": tasks.tolist(),
        "configuration": {**(configuration or {}), **own},
    }
    if plan.cached_prefix is not None:
        saved["first_query"] = plan.cached_prefix.tolist()
    if plan.parents is not None:
        saved["parents"] = plan.parents.tolist()
    if plan.query_shift is not None:
        saved["query_shift"] = plan.query_shift.tolist()
    if stepped.kept is not None:
        saved["kept"] = np.stack(stepped.kept, axis=2).tolist()
    write_text(path, json.dumps(saved) + "\n")


def load_plan(path: Path) -> tuple[Plan, dict[str, object]]:
    """Reads and validates a plan that `save_plan`, or another program, wrote.

    Returns:
        The plan, and its configuration.

    Raises:
        ValueError: the file is missing, is not in this format, or holds no valid plan, or one of
            inference, in steps.
    """
    stepped, configuration = load_stepped_plan(path)
    if stepped.in_steps:
        raise ValueError(f"{path} is a plan of inference, in steps: give one of training")
    return stepped.plan, configuration


def load_stepped_plan(path: Path) -> tuple[SteppedPlan, dict[str, object]]:
    """Reads and validates any plan that `save_plan`, or another program, wrote.

    Returns:
        The plan, in one step unless the file says more, and its configuration.

    Raises:
        ValueError: the file is missing, is not in this format, or holds no valid plan.
    """
    text = read_text(Path(path), "make a plan with `distca plan --save`")
    try:
        saved = json.loads(text)
        if saved["format"] != FORMAT:
            raise ValueError(f"its format is {saved['format']}, not {FORMAT}")
        configuration = dict(saved["configuration"])
        rows = [
            (*map(int, piece), rank)
            for rank, pieces in enumerate(saved["placement"])
            for piece in pieces
        ]
        table = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        document, start, end, rank = (np.ascontiguousarray(column) for column in table)
        tasks, step = _read_tasks([tuple(map(int, row)) for row in saved["tasks"]])
        plan = Plan(
            np.array(saved["documents"], dtype=np.int64),
            Placement(document, start, end, rank, len(saved["placement"])),
            tasks,
            Mask(configuration.get("window_left"), configuration.get("attention_chunk")),
            int(configuration["block"]),
            str(configuration.get("scheduler", "")),
            tuple(configuration.get("notes", ())),
            np.array(saved["first_query"], dtype=np.int64) if "first_query" in saved else None,
            int(configuration.get("head_groups", 1)),
            np.array(saved["parents"], dtype=np.int64) if "parents" in saved else None,
            np.array(saved["query_shift"], dtype=np.int64) if "query_shift" in saved else None,
        )
        kept = None
        if "kept" in saved:
            counts = np.array(saved["kept"], dtype=np.int64).reshape(len(tasks), -1, 2)
            kept = KeptRows(counts[:, :, 0], counts[:, :, 1])
        stepped = SteppedPlan(
            plan,
            step,
            bool(configuration.get("relays", True)),
            bool(configuration.get("gathers", False)),
            kept,
        )
        validate_stepped_plan(stepped)
    # Lists in lists in lists, and numbers of many digits, are JSON, too.
    except (
        *(OSError, LookupError, TypeError, AttributeError, ValueError),
        *(RecursionError, OverflowError),
    ) as error:
        raise ValueError(
            f"{path} is no usable plan ({error or type(error).__name__}): make one with `distca "
            "plan --save`"
        ) from error
    return stepped, configuration


def _read_tasks(rows: list[tuple[int, ...]]) -> tuple[Tasks, Int64s]:
    """Reads tasks, each with its step behind or none, and returns the step of each, too."""
    table = np.array(rows, dtype=np.int64).reshape(len(rows), -1 if rows else _TASK_COLUMNS)
    if table.shape[1] not in (_TASK_COLUMNS, _TASK_COLUMNS + 1):
        raise ValueError(f"its tasks have {table.shape[1]} numbers each")
    step = table[:, _TASK_COLUMNS:].sum(axis=1)
    return Tasks(*(np.ascontiguousarray(each) for each in table[:, :_TASK_COLUMNS].T)), step
