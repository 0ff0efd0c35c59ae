"""Wrappers around functions that warn: the warning is the caller's, as it is without us."""

from __future__ import annotations

import traceback
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from harness import frames
from harness.probe import patching
from harness.probe.state import S


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(S, "recorder", types.SimpleNamespace(disabled=False))


def made(warns: Callable[[str], None]) -> types.SimpleNamespace:
    """Wrapped three times, as several sensors do it."""
    owner = types.SimpleNamespace(old=warns)
    patching.before(owner, "old", lambda *args: None)
    patching.after(owner, "old", lambda *args: None)
    patching.before(owner, "old", lambda *args: None)
    return owner


def old(text: str) -> None:
    warnings.warn(text, FutureWarning, stacklevel=2)


def test_a_warning_names_the_line_that_called() -> None:
    owner = made(old)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for call in (old, owner.old):
            call("it goes")
    one, other = [(w.filename, w.lineno, str(w.message)) for w in seen]
    assert one == other and one[0] == __file__


def test_the_filters_of_the_script_go_by_its_module() -> None:
    owner: Any = made(old)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module=__name__)
        with pytest.raises(FutureWarning, match="it goes") as raised:
            owner.old("it goes")
    inner = [f for f in traceback.extract_tb(raised.value.__traceback__) if f.name == "wrapper"]
    assert len(inner) == 3 and all(frames.is_ours(f.filename) for f in inner)


def test_a_warning_is_shown_once_a_line() -> None:
    owner = made(old)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            owner.old("again and again")
    assert len(seen) == 1
