"""Hardware descriptions: every value has a source, and unknown names are answered with near ones."""

from __future__ import annotations

import pytest

from terapipe.planner.hardware import HARDWARE, Value, hardware


def test_every_value_of_every_hardware_has_a_source():
    for item in HARDWARE.values():
        values = [value for value in vars(item).values() if isinstance(value, Value)]
        assert len(values) == 14 and all(len(value.source) > 5 and float(value) > 0 for value in values)
        assert item.name in str(item)
    with pytest.raises(ValueError, match="did you mean 'h100-sxm'"):
        hardware("h100")
