"""MEM101 loss-kept-with-graph: losses or outputs of earlier steps are kept together with their autograd graphs.

What it does
    Counts the autograd graphs of earlier steps that are still alive. A number that climbs step by step is a warning, at the statement
    that keeps them where the source shows it, else at the backward. So are lists and deques of the script's in which tensors with a graph become more
    with each step, looked at after 16 steps and after 40: what another model than the wrapped one gave out.

Why it is bad
    A loss is the last node of its graph. Keeping it keeps every node, some kilobytes a step after backward, all activations where no
    backward followed. Memory climbs until the process is killed, hours later.

Wrong
    losses.append(loss)
    total += loss

Right
    losses.append(loss.detach())
    total += loss.item()

Known limits
    A window that is bounded (the last 10 losses) is silent once it is full. The statement is found by reading the file that holds the
    backward only.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.mem import series
from harness.model import Finding, Severity, Where
from harness.probe import protocol
from harness.record import Recording, Run, where_of

MIN_STEPS = 12  # over which the number has to climb
MIN_A_STEP = 0.8
MIN_SHORT, MIN_TIMES, SHARE = 6, 3, 0.7  # steps, climbs, share of all steps: a sum that is emptied after every short epoch


ATTRIBUTE = re.compile(r"^\w+\.\w+ = [\w, ]+$")
ON_CTX = "hand it to `ctx.save_for_backward(...)`: as an attribute the output holds the node that holds it"


class LossKeptWithGraph(Check):
    code = "MEM101"
    name = "loss-kept-with-graph"
    severity = Severity.WARNING
    explains = ("MEM103", "MEM105", "MEM104")

    def end(self, run: Run) -> Iterable[Finding]:
        trained = [(rank, r) for rank, r in _processes(run) if r.num_rows]
        if not trained:
            raise NotApplicable("no rank took an optimizer step")
        if max(r.num_rows for _, r in trained) < MIN_STEPS:
            raise Inconclusive(f"fewer than {MIN_STEPS} steps")
        climbing = [(rank, r, climb) for rank, r in trained if (climb := longest_climb(r) or _again_and_again(r)) is not None]
        if not climbing:
            yield from self._in_a_container(run)
            return
        rank, recording, (first, last, from_num, to_num) = max(climbing, key=lambda item: item[2][3] - item[2][2])
        where = _keeper(recording)
        on_ctx = where is not None and where.function == "forward" and ATTRIBUTE.match(where.text) is not None
        yield self.finding(
            f"{to_num} autograd graphs of earlier steps are alive after step {last}: "
            + ("a Function keeps its own output on its context" if on_ctx else "losses or outputs are kept with their graph"),
            where=where,
            ranks=sorted({rank for rank, _, _ in climbing}),
            notes=[f"rank {rank}: {from_num} graphs alive at step {first}, {to_num} at step {last}"],
            help=ON_CTX if on_ctx else "keep `loss.detach()` for a tensor or `loss.item()` for a number",
        )


    def _in_a_container(self, run: Run) -> Iterable[Finding]:
        """What another model than the wrapped one gave out, and a loss was not made of."""
        found = [(rank, e) for rank, e in run.events("graphs_held") if isinstance(e["num"], int) and e["name"]]
        if found:
            rank, event = found[0]
            yield self.finding(
                f"{event['num']} tensors stand in `{event['name']}` with the autograd graphs that they came from, and each step adds more",
                where=event.where or next((e.where for _, e in run.events("accumulation") if e.where is not None), None),
                ranks=sorted({r for r, _ in found}),
                notes=[f"rank {rank}: {event['grown']} more in {event['steps']} steps"],
                help="compute them under `torch.no_grad()`, or keep `.detach()` of them",
            )


def _processes(run: Run) -> list[tuple[int, Recording]]:
    """The ranks, and processes that train without a group."""
    ranks = [(rank, r) for rank, r in enumerate(run.ranks) if r is not None]
    known = {id(r) for _, r in ranks}
    return [*ranks, *((max(r.env_rank, 0), r) for r in run.processes if id(r) not in known and r.num_rows)]


def longest_climb(recording: Recording) -> tuple[int, int, int, int] | None:
    """(first step, last step, graphs alive then) of the longest stretch in which the number rises by about one a step or more."""
    steps, alive = series.numbers(recording, "num_graphs")
    if not alive or max(alive) - min(alive) < min(16, MIN_A_STEP * MIN_STEPS):
        return None
    best: tuple[int, int] | None = None
    start = 0
    for i in range(1, len(alive) + 1):
        if i == len(alive) or alive[i] < alive[i - 1]:
            end = i - 1
            if _climbs(steps, alive, start, end) and (best is None or alive[end] - alive[start] > alive[best[1]] - alive[best[0]]):
                best = (start, end)
            start = i
    return (steps[best[0]], steps[best[1]], alive[best[0]], alive[best[1]]) if best is not None else None


def _again_and_again(recording: Recording) -> tuple[int, int, int, int] | None:
    """The highest of many short climbs, one graph a step from pass to pass, where the source shows the statement that keeps them."""
    if not any(e["mode"] == "train" and where_of(e["keeper"]) is not None for e in recording.of("graphs")):
        return None
    steps, alive = series.numbers(recording, "num_graphs")
    exact = sum(step < protocol.EVERY_GRAPH for step in steps)
    found = _short_climb(alive)
    if found is None and (early := _short_climb(alive[:exact])) is not None and 2 * max(alive[exact:], default=0) >= alive[early[1]]:
        found = early  # behind them few are counted: the number goes up in leaps then, but it still goes up
    return (steps[found[0]], steps[found[1]], alive[found[0]], alive[found[1]]) if found is not None else None


def _short_climb(alive: list[int]) -> tuple[int, int] | None:
    """(where it begins, its end) of the highest one, where most of the steps belong to such."""
    starts = [0, *(i for i in range(1, len(alive)) if alive[i] < alive[i - 1]), len(alive)]
    short = [
        (a, b - 1) for a, b in itertools.pairwise(starts) if b - 1 - a >= MIN_SHORT and alive[b - 1] - alive[a] >= MIN_A_STEP * (b - 1 - a)
    ]
    if len(short) < MIN_TIMES or sum(b - a + 1 for a, b in short) < SHARE * len(alive):
        return None
    return max(short, key=lambda s: alive[s[1]])


def _climbs(steps: list[int], alive: list[int], start: int, end: int) -> bool:
    """Rises about once a step over enough steps; or more slowly, but over most of a long run (every tenth loss is kept)."""
    grown, length = alive[end] - alive[start], steps[end] - steps[start]
    if length < MIN_STEPS:
        return False
    return grown >= MIN_A_STEP * length or (grown >= 16 and length >= 0.7 * (steps[-1] + 1) and _even(alive, start, end))


def _even(alive: list[int], start: int, end: int) -> bool:
    """Each quarter of the stretch adds its part."""
    quarter = max(1, (end - start) // 4)
    marks = [alive[min(end, start + i * quarter)] for i in range(5)]
    return all(b - a >= (alive[end] - alive[start]) / 12 for a, b in itertools.pairwise(marks))


def _keeper(recording: Recording) -> Where | None:
    told = [e for e in recording.of("graphs") if e["mode"] == "train"]
    kept = next((w for e in reversed(told) if (w := where_of(e["keeper"])) is not None), None)
    losses = recording.of("loss")
    return kept or (told[-1].where if told else None) or (losses[0].where if losses else None)
