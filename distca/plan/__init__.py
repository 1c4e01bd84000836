"""The plan of core attention, and what it is made of: spans, placement, mask and tasks."""

from distca.plan.mask import LayerMasks, Mask
from distca.plan.placement import Placement, place_in_turn, place_sequentially
from distca.plan.plan import BLOCK, Plan
from distca.plan.saved import load_plan, load_stepped_plan, save_plan
from distca.plan.segments import Segments
from distca.plan.stepped import KeptRows, SteppedPlan
from distca.plan.tasks import Tasks
from distca.plan.validate import validate_plan, validate_stepped_plan

__all__ = [
    "BLOCK",
    "KeptRows",
    "LayerMasks",
    "Mask",
    "Placement",
    "Plan",
    "Segments",
    "SteppedPlan",
    "Tasks",
    "load_plan",
    "load_stepped_plan",
    "place_in_turn",
    "place_sequentially",
    "save_plan",
    "validate_plan",
    "validate_stepped_plan",
]
