"""How trials are dealt to lanes."""

from __future__ import annotations

from harness.trials import Trial, Turns


def test_lanes_share_the_kinds_and_then_help_each_other() -> None:
    trials = [Trial(name, "", nproc) for name, nproc in (("a1", 1), ("b1", 1), ("a2", 2), ("b2", 2), ("a3", 3), ("b3", 3))]
    turns, left, right = Turns(trials), object(), object()
    dealt = [[trial.name for lane in (left, right) if (trial := turns.next(lane))] for _ in range(4)]
    assert dealt == [["a2", "a1"], ["b2", "b1"], ["a3", "b3"], []]


def test_a_device_table_of_ours_is_no_other_kind() -> None:
    turns = Turns([Trial("plain", "", 2), Trial("theirs", "", 2, env={"NCCL_DEBUG": "INFO"}), Trial("ours", "", 2, env={"_HARNESS_DEVICE_TABLE": "[]"})])
    lane = object()
    assert [trial.name for _ in range(3) if (trial := turns.next(lane))] == ["plain", "ours", "theirs"]


def test_nothing_is_dealt_after_the_stop() -> None:
    turns = Turns([Trial("a", "", 2)])
    turns.stop()
    assert turns.next(object()) is None
