"""The engine: runs a plan over a list of layers.  See `Pipeline`."""

from terapipe.engine.batch import NO_TARGET, Batch
from terapipe.engine.failure import PipelineError
from terapipe.engine.loss import cross_entropy_sum
from terapipe.engine.pipeline import Pipeline
from terapipe.engine.results import EvaluationResult, MemoryReport, StepResult

__all__ = [
    "NO_TARGET",
    "Batch",
    "EvaluationResult",
    "MemoryReport",
    "Pipeline",
    "PipelineError",
    "StepResult",
    "cross_entropy_sum",
]
