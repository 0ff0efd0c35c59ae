"""Which lru_caches keep tensors and are never hit."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from harness.probe import hitless, sites


class Tensor:
    """Hashes by identity, as torch's do."""

    def data_ptr(self) -> int:
        return 0


def wide(x: Any) -> Any:
    return x


def named(monkeypatch: pytest.MonkeyPatch, cached: Any) -> list[int]:
    monkeypatch.setattr(hitless, "_named", lambda: [cached, 7, wide])
    monkeypatch.setattr(sites, "is_user_code", lambda code: True)
    return [num for _, num in hitless.caches(20)]


def filled(*arguments: Any, maxsize: int | None = None) -> Any:
    cached = functools.lru_cache(maxsize=maxsize)(wide)
    for one in arguments:
        cached(one)
    return cached


def test_a_cache_on_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert named(monkeypatch, filled(*(Tensor() for _ in range(30)))) == [30]


def test_caches_that_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [Tensor() for _ in range(30)]
    assert named(monkeypatch, filled(*kept, *kept)) == []  # hit
    assert named(monkeypatch, filled(*range(30))) == []  # numbers
    assert named(monkeypatch, filled(*kept, maxsize=16)) == []  # bounded
    assert named(monkeypatch, filled(*kept[:9])) == []  # filled now and then
