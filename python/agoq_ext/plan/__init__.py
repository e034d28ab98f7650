"""What training a model will keep in memory, worked out from its configuration before anything runs."""

from __future__ import annotations

from .memory import MemoryPlan, PipelinePlan, plan_memory, plan_pipeline
from .operators import COLUMNS, layer_bytes, outside_bytes, paper_units
from .shapes import ModelShape, read_shape

__all__ = [
    "COLUMNS",
    "MemoryPlan",
    "ModelShape",
    "PipelinePlan",
    "layer_bytes",
    "outside_bytes",
    "paper_units",
    "plan_memory",
    "plan_pipeline",
    "read_shape",
]
