"""A look whose time is over is not called any more, and comes back in a child that counts from 0."""

from __future__ import annotations

from harness.probe.looks import Looks


def test_a_look_is_due_until_its_end() -> None:
    looks = Looks()
    looks.append("always")
    looks.append("early", 3)
    looks.append("later too", 5)
    assert looks.due(0) == ["always", "early", "later too"]
    assert looks.due(2) == ["always", "early", "later too"]
    assert looks.due(3) == ["always", "later too"]
    assert looks.due(700) == ["always"]
    assert looks.due(0) == ["always", "early", "later too"]


def test_a_look_that_is_added_late_is_due_at_once() -> None:
    looks = Looks()
    assert looks.due(0) == []
    looks.append("added")
    assert looks.due(0) == ["added"]


def test_a_look_without_anything_to_work_on_is_not_due() -> None:
    looks, pending = Looks(), list[int]()
    looks.append("pending", when=pending)
    looks.append("always")
    assert looks.due(0) == ["always"]
    pending.append(1)
    assert looks.due(0) == ["pending", "always"]
