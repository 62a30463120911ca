"""`terapipe profile`: what slices cost on this machine, as a `CostModel`."""

from terapipe.profile.host import measure_host
from terapipe.profile.profiler import Grid, Profiler

__all__ = ["Grid", "Profiler", "measure_host"]
