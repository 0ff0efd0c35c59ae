"""OPT138 window-crosses-epochs: the gradients of an unfinished window are taken into the first step of the next epoch

What it does
    For a loop that accumulates: counts the micro-batches of each step since its gradients were zeroed. A finding where the step that
    follows the end of a pass over the data takes those that the pass left over on top of a whole window, in every pass that was seen.

Why it is bad
    The number of micro-batches of an epoch is seldom a multiple of the window. What is left over is neither stepped nor cleared: the next
    epoch's first step is the sum of more micro-batches than it is divided by, and after the last epoch they are lost.

Wrong
    for i, batch in enumerate(loader):
        (loss(batch) / window).backward()
        if (i + 1) % window == 0:
            optimizer.step(); optimizer.zero_grad()

Right
        if (i + 1) % window == 0 or i + 1 == len(loader):      # and divide by the length of that window

Known limits
    Needs two passes and their ends among the steps that are told: the first 24, and 16 unusual ones after them. A window that goes on across
    the end of an epoch and is as long as the others (a count of its own) is healthy; so is a leftover that is cleared, and gradients that are
    divided by what they are the sum of before the step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from itertools import pairwise

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes
from harness.checks.syn import gradients
from harness.model import Finding, Severity
from harness.record import Event, Recording, Run, where_of


class WindowCrossesEpochs(Check):
    code = "OPT138"
    name = "window-crosses-epochs"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        counts = {rank: _counts(r) for rank, r in enumerate(run.ranks) if r is not None}
        windows = {rank: statistics.mode(c.values()) for rank, c in counts.items() if c}
        if not any(w > 1 for w in windows.values()):
            raise NotApplicable("gradients are not accumulated over several backwards")
        if gradients.rescaled(run):
            raise NotApplicable("gradients are rescaled between the backward and the step: by what a window holds, perhaps")
        found = [(rank, w, leaks) for rank, w in windows.items() if (leaks := _leaks(run, rank, w, counts[rank]))]
        if not found or len(found) < len(windows):
            return
        rank, window, leaks = found[0]
        step, taken = leaks[0]
        recording = run.ranks[rank]
        event = next((e for e in _windows(recording) if e.step == step), None) if recording is not None else None
        decided = next((e.where for _, e in run.events("window_condition") if e.where is not None), None)
        yield self.finding(
            f"the first step of an epoch takes {taken} micro-batches where the others take {window}: {taken - window} are left over from the epoch before",
            where=decided or (where_of(event["sites"][0][0]) if event is not None else None),
            ranks=[r for r, _, _ in found],
            notes=[f"so at the first step of {len(leaks)} epochs; their gradients were neither stepped nor zeroed when the pass ended"],
            help=f"step at the end of the pass too, `if (i + 1) % {window} == 0 or i + 1 == len(loader)`, and divide by that window's length",
        )


def _windows(recording: Recording) -> list[Event]:
    return [e for e in recording.of("accumulation") if isinstance(e["sites"], list) and e["sites"] and _is_counted(e["sites"][0])]


def _is_counted(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], int)


def _counts(recording: Recording) -> dict[int, int]:
    """Step -> backwards of the first statement since the gradients were zeroed."""
    return {e.step: e["sites"][0][1] for e in _windows(recording)}


def _leaks(run: Run, rank: int, window: int, counts: dict[int, int]) -> list[tuple[int, int]]:
    """(first step of a pass, micro-batches in it) of each pass that follows another; empty unless all take what was left over, and no other step does."""
    trained = [p for p in passes.training(run) if p.rank == rank and p.closed is not None]
    firsts = {after.opened.step: before.num_batches % window for before, after in pairwise(trained) if before.key == after.key}
    seen = {step: left for step, left in firsts.items() if step in counts and left}
    if not seen or any(counts[step] != window + left for step, left in seen.items()):
        return []
    if any(n > window for step, n in counts.items() if step not in seen):
        return []
    return [(step, counts[step]) for step in sorted(seen)]
