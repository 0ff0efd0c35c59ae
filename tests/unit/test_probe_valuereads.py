"""Which reads of an attribute ask for its value."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from harness.probe import valuereads

torch = pytest.importorskip("torch")
read: list[bool] = []


class Reader:
    def __getattr__(self, name: str) -> Any:
        if name != "buffer":
            raise AttributeError(name)
        read.append(valuereads.is_value(sys._getframe(1)))
        return torch.ones(3)


def times(r: Any) -> Any:
    return 2 * r.buffer


def part(r: Any) -> Any:
    return r.buffer[:2]


def given(r: Any) -> Any:
    return torch.add(
        torch.ones(3),
        r.buffer,
    )


def method(r: Any) -> Any:
    return r.buffer.cos()


def shape(r: Any) -> Any:
    return r.buffer.shape[0]


def device(r: Any) -> Any:
    return torch.arange(3, device=r.buffer.device)


def size(r: Any) -> Any:
    return r.buffer.size(0)


def there(r: Any) -> Any:
    return r.buffer is not None


def like(r: Any) -> Any:
    return torch.zeros_like(r.buffer)


def new(r: Any) -> Any:
    return r.buffer.new_zeros(3)


def nothing(r: Any) -> Any:
    filled = 0
    return torch.cat([torch.ones(1), r.buffer[:filled]])


def filled(r: Any) -> Any:
    filled = 2
    return torch.cat([torch.ones(1), r.buffer[:filled]])


def computed(r: Any) -> Any:
    return r.buffer[: max(0, 0)]


VALUES = (times, part, given, method, filled, computed)
NONE = (shape, device, size, there, like, new, nothing)


@pytest.mark.parametrize(("reads", "value"), [(f, True) for f in VALUES] + [(f, False) for f in NONE])
def test_what_is_read_for_its_value(reads: Any, value: bool) -> None:
    read.clear()
    reads(Reader())
    assert read == [value]


def test_without_source_nothing_is_known() -> None:
    read.clear()
    eval("2 * r.buffer", {"r": Reader()})
    assert read == [False]
