"""Which parameters that no optimizer holds may be a copy of those that one has."""

from __future__ import annotations

import pytest

from harness.probe.sensors import reached

torch = pytest.importorskip("torch")


def test_a_flat_parameter_is_no_copy() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    assert reached._may_be_copied(param) and not reached._may_be_copied(torch.ones(3))
    param._is_flat_param = True  # as FSDP1 marks its own
    assert not reached._may_be_copied(param)
