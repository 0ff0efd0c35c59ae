"""SYN118 none-grad-asymmetric: a hand-written sync skips parameters that have no gradient on this rank

What it does
    Compares which gradients each rank gives to a collective between two steps: how many, how large, and, where those fit, of which parameters.

Why it is bad
    `if p.grad is not None: all_reduce(p.grad)` pairs the ranks' collectives wrongly as soon as one rank has a gradient more: gloo
    aborts without a traceback, or the wrong gradients are added: of two heads of one shape, one rank's first and the other's second.

Wrong
    for p in model.parameters():
        if p.grad is not None: dist.all_reduce(p.grad)

Right
    for p in model.parameters():
        if p.grad is None: p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)

Known limits
    Sees the first 3,000 collectives of a process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.hng import waits
from harness.checks.lau import blame
from harness.checks.syn import pairing
from harness.model import Finding, Severity, Where
from harness.record import Event, Recording, Run, number


class NoneGradAsymmetric(Check):
    code = "SYN118"
    name = "none-grad-asymmetric"
    severity = Severity.ERROR
    provisional = True
    explains = ("LAU101", "LAU102", "HNG*", "SYN122", "SYN123", "SYN121", "SYN127", "SYN134", "SYN137", "OPT111", "DAT111", "OUT101", "EVL102")

    def end(self, run: Run) -> Iterable[Finding]:
        if run.world_size < 2:
            raise NotApplicable("one process")
        columns = {rank: [e for e in r.of("coll") if e["grad"]] for rank, r in enumerate(run.ranks) if r is not None}
        if sum(bool(c) for c in columns.values()) < 2:
            raise NotApplicable("no hand-written gradient sync")
        if pairing.lone(run, pairing.of(run)) is not None:
            return  # another collective, on some ranks only, broke the pairing: the gradients merely follow
        steps = {rank: Counter(e.step for e in c) for rank, c in columns.items()}
        reached = min(_told(r) for r in run.present) - (run.live or died_on_its_way(run))  # the step in work is not all told yet
        failed = any(e.code for e in run.ending.exits) or run.ending.reason == "hang"
        for step in sorted({s for counter in steps.values() for s in counter if s <= reached}):
            counts = {rank: s[step] for rank, s in steps.items()}
            sizes = {rank: [e["numel"] for e in columns[rank] if e.step == step] for rank in columns}
            short = min(len(v) for v in sizes.values())
            paired = short > 0 and len({tuple(v[:short]) for v in sizes.values()}) == 1
            if failed and not paired and short and not _meet(run, step):
                yield self._met(columns, step, next(i for i in range(short) if len({v[i] for v in sizes.values()}) > 1))
                return
            if len(set(counts.values())) > 1 and (failed or not paired) and not _meet(run, step):
                fewest = min(counts, key=lambda r: counts[r])
                if fewest in waits.stuck_alone(run):
                    return
                yield self.finding(
                    f"rank {fewest} synchronises {counts[fewest]} gradients at step {step}, the others up to {max(counts.values())}",
                    where=columns[max(counts, key=lambda r: counts[r])][0].where,
                    ranks=(fewest,),
                    notes=[f"gradients synchronised a rank: {', '.join(f'{r}: {c}' for r, c in sorted(counts.items()))}"],
                    help="give every parameter a gradient before the loop: `if p.grad is None: p.grad = torch.zeros_like(p)`",
                )
                return
        crossed = _crossed(run, columns)
        if crossed is not None:
            yield self._parted(*crossed)

    def _parted(self, step: int, where: Where | None, only: list[tuple[int, str]]) -> Finding:
        (one, mine), (other, theirs) = only[:2]
        return self.finding(
            f"the ranks average gradients of different parameters with each other: at step {step} rank {one} gives {mine} where rank {other} "
            f"gives {theirs}",
            where=where,
            ranks=(one, other),
            notes=["a parameter that has no gradient is skipped on the rank that did not use it; the calls fit in number and size"],
            help="give every parameter a gradient before the loop: `if p.grad is None: p.grad = torch.zeros_like(p)`",
        )

    def _met(self, columns: dict[int, list[Event]], step: int, nth: int) -> Finding:
        """The first call of a step in which gradients of different sizes meet; the run broke there, so the numbers of calls do not tell."""
        here = {rank: [e for e in c if e.step == step][nth] for rank, c in columns.items()}
        one = min(here)
        other = next(rank for rank in here if here[rank]["numel"] != here[one]["numel"])
        return self.finding(
            f"the ranks synchronise gradients of different parameters: call {nth + 1} of step {step} has {here[one]['numel']} elements on rank {one} "
            f"and {here[other]['numel']} on rank {other}",
            where=here[one].where,
            ranks=(one, other),
            notes=["a parameter that has no gradient is skipped on the rank that did not use it"],
            help="give every parameter a gradient before the loop: `if p.grad is None: p.grad = torch.zeros_like(p)`",
        )


def _told(recording: Recording) -> int:
    """Steps up to which all of its calls are there: only the first calls of a process are told."""
    told = recording.of("coll")
    return recording.num_steps if len(told) < pairing.MAX_EVENTS else min(recording.num_steps, told[-1].step - 1)


def _crossed(run: Run, columns: dict[int, list[Event]]) -> tuple[int, Where | None, list[tuple[int, str]]] | None:
    """(step, site, what only each rank gives) of the first step at which every rank reduces each gradient that it has by a call of its own, as many
    of them from the same statements, but of other parameters."""
    having: dict[int, dict[int, dict[str, int]]] = {}  # step -> rank -> sizes of the parameters that have a gradient before anything is reduced
    for rank in columns:
        recording = run.ranks[rank]
        for e in recording.of("gradients") if recording is not None else ():
            having.setdefault(e.step, {}).setdefault(rank, {}).update(_sizes(recording, e))
    for step, held in sorted(having.items()):
        if len(held) < len(columns) or len({frozenset(h) for h in held.values()}) == 1:
            continue
        made = {rank: _called(run.ranks[rank], step) for rank in columns}
        graded = {pairing.site_key(e) for c in columns.values() for e in c if e.step == step}
        calls = {rank: [e for e in c if pairing.site_key(e) in graded] for rank, c in made.items()}  # zeros that the loop fills in are no known gradient
        if len({tuple(pairing.site_key(e) for e in c) for c in made.values()}) > 1:
            continue  # a statement of its own for what a rank lacks
        if all(calls[rank] and sorted(number(e["numel"]) for e in calls[rank]) == sorted(held[rank].values()) for rank in columns):
            one = min(held)
            other = next(r for r in sorted(held) if held[r].keys() != held[one].keys())
            told = [(a, ", ".join(sorted(held[a].keys() - held[b].keys())[:4])) for a, b in ((one, other), (other, one))]
            return step, calls[one][0].where, told
    return None


def _sizes(recording: Recording | None, told: Event) -> dict[str, int]:
    """Parameters that have a gradient after the backward, with their sizes."""
    params = recording.params_at(told["opt"], told.step) if recording is not None and isinstance(told["opt"], int) else None
    numels = {str(n): number(k) for n, k in zip(params["names"] or (), params["numels"] or (), strict=False)} if params is not None else {}
    names, local = told["names"], told["local"]
    if not isinstance(names, dict) or not isinstance(local, dict):
        return {}
    return {str(n): numels.get(str(n), -2) for i, n in names.items() if i in local}


def _called(recording: Recording | None, step: int) -> list[Event]:
    return [e for e in recording.of("coll") if e.step == step and e["world"] is not False] if recording is not None else []


def died_on_its_way(run: Run) -> bool:
    """Whether a rank was killed, or left, between two calls: those that its last step lacks are no skipped gradients. What it says of a
    missing gradient itself is none of that."""
    fall = blame.culprit(run)
    return blame.fell_alone(run) and fall is not None and not (fall.event is not None and "NoneType" in fall.headline)


def _meet(run: Run, step: int) -> bool:
    """Whether the ranks' collectives of a step fit each other one by one: none was skipped, whatever each rank's tensor is."""
    columns = [[(e["op"], e["numel"], e["dtype"]) for e in r.of("coll") if e.step == step and e["world"] is not False] for r in run.present]
    return all(c == columns[0] for c in columns)
