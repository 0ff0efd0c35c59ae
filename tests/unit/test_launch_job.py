"""What passes between shim, supervisor and controller, where the script may have written into it too."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.launch import job as wire

GOOD = {"rank": 1, "pid": 7, "code": -9, "time_ns": 5, "passed": [15]}


def test_a_shims_line_arrives_as_it_is() -> None:
    assert wire.shim_event(GOOD) == GOOD
    assert wire.shim_event({"rank": 0, "local_rank": 0, "pid": 7, "ticks": 3}) == {"rank": 0, "local_rank": 0, "pid": 7, "ticks": 3}


@pytest.mark.parametrize("forged", [[], "x", 3, None, {**GOOD, "code": "0"}, {**GOOD, "rank": []}, {**GOOD, "passed": ["15"]}, {**GOOD, "pid": 1.5}])
def test_a_forged_line_is_refused(forged: Any) -> None:
    with pytest.raises(TypeError):
        wire.shim_event(forged)


@given(st.recursive(st.none() | st.integers() | st.text(max_size=4), lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=4), inner), max_leaves=6))
def test_anything_is_refused_or_whole(raw: Any) -> None:
    try:
        event = wire.shim_event(raw)
    except (TypeError, KeyError):
        return
    assert all(isinstance(value, (int, list)) for value in event.values())
