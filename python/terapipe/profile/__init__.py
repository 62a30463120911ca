"""`terapipe profile`: what slices cost on this machine, as a `CostModel`."""

from terapipe.profile.host import measure_host
from terapipe.profile.profiler import Grid, Profiler, check_memory

__all__ = ["Grid", "Profiler", "check_memory", "measure_host"]
