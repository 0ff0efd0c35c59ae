"""When and where the replicas of a model parted: read once from a run, shared by the checks of this family and of `opt`.

A *replica* is a set of parameters that should stay bit-identical on all ranks: those that DDP wraps, and those of an optimizer that start
equal and are synced by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.checks import regime
from harness.checks.base import NotApplicable
from harness.model import Where
from harness.probe import protocol
from harness.probe.protocol import Row
from harness.record import Event, Recording, Run, number, where_of
from harness.steps import Step

# Collectives that can carry gradients or parameters.
MOVERS = {"all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", *protocol.GATHER_INTO, *protocol.REDUCE_SCATTER_INTO}


@dataclass
class Parting:
    """What of one optimizer differed between ranks, first time each."""

    opt: int
    steps: int = 0  # aligned steps whose parameters were hashed
    grad_step: int | None = None  # first step whose gradients differ
    param_step: int | None = None
    hyper_step: int | None = None
    none_step: int | None = None
    full_step: int | None = None
    num_grad: int = 0  # steps with differing gradients
    num_param: int = 0
    num_returns: int = 0  # times that the gradients agreed again after they had differed
    apart: bool = False  # they differ at the newest step
    grad_names: tuple[str, ...] = ()
    param_names: tuple[str, ...] = ()
    equal_grad_names: tuple[str, ...] = ()
    first_rows: tuple[Row, ...] = ()  # of the first step with differing gradients, or parameters


@dataclass
class Replicas:
    run: Run
    partings: dict[int, Parting] = field(default_factory=dict)
    same_opts: bool = True  # the ranks' optimizers step in the same order
    num_reduce: int = 0  # steps whose backward DDP's reducer answered
    num_ddp_steps: int = 0
    silent_from: int | None = None  # first of the steps of DDP's parameters since which no rank's reducer communicates, to the end of the run
    num_silent: int = 0
    hand_synced_numel: int = 0

    @property
    def wrapped(self) -> bool:
        return any(r.of("wrap") for r in self.run.present)

    def of(self, opt: int) -> Parting:
        return self.partings.setdefault(opt, Parting(opt))

    def params_event(self, opt: int, rank: int = 0, step: int | None = None) -> Event | None:
        recording = self.run.ranks[rank] if rank < len(self.run.ranks) else None
        return recording.params_at(opt, step) if recording is not None else None

    def ddp_names(self, opt: int) -> set[str]:
        """Parameters of an optimizer that some DDP object covers at some time."""
        events = [e for r in self.run.present[:1] for e in r.of(protocol.PARAMS) if e["opt"] == opt]
        return {n for e in events for n, w in zip(e["names"] or (), e["ddp"] or (), strict=False) if isinstance(w, int) and w >= 0}

    def grad_site(self, opt: int, step: int | None = None) -> Where | None:
        """The backward before a step of this optimizer: the first one told from that step on, else the last one told before."""
        told = [e for r in self.run.present for e in r.of("accumulation") if e["opt"] == opt and e.where]
        later = [e for e in told if step is None or e.step >= step]
        if later or told:
            return (later or told[-1:])[0].where
        return first_where(self.run, "accumulation") or first_where(self.run, "loss")


def first_where(run: Run, kind: str) -> Where | None:
    return next((e.where for _, e in run.events(kind) if e.where is not None), None)


def loss_site(run: Run) -> Where | None:
    """The statement that made the first loss, else its backward."""
    made = next((w for _, e in run.events("loss") if (w := where_of(e["made"])) is not None), None)
    return made or first_where(run, "loss")


def rank_list(ranks: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(ranks)))


def of(run: Run) -> Replicas:
    """The facts of a run; computed once for all checks of one judgement."""
    found = run.__dict__.get("_replicas")
    if isinstance(found, Replicas):
        return found
    made = _read(run)
    run.__dict__["_replicas"] = made
    return made


def _read(run: Run) -> Replicas:
    facts = Replicas(run)
    if len(run.present) < 2:
        return facts
    for step in run.steps():
        if step.complete:
            _look(facts, step)
    if _between_steps(facts):
        del facts.partings[protocol.OPT_BY_HAND]
    for parting in facts.partings.values():
        _name(facts, parting)
    facts.hand_synced_numel = max((_hand_synced(r) for r in run.present), default=0)
    return facts


def _between_steps(facts: Replicas) -> bool:
    """Whether what looked like a step by hand moved parameters that an optimizer steps: SAM moves them there, by its own rank's gradient."""
    by_hand = facts.params_event(protocol.OPT_BY_HAND) if protocol.OPT_BY_HAND in facts.partings else None
    held = {n for opt in facts.partings if opt != protocol.OPT_BY_HAND and (event := facts.params_event(opt)) for n in event["names"] or ()}
    return by_hand is not None and bool(held) and set(by_hand["names"] or ()) <= held


def _look(facts: Replicas, step: Step) -> None:
    opts = set(step.number("opt"))
    if len(opts) != 1:
        facts.same_opts = False
        return
    parting = facts.of(opts.pop())
    flags = step.number("flags")[0]
    if flags & protocol.FLAG_DDP:
        facts.num_ddp_steps += 1
        _look_at_reducer(facts, step)
    if not step.taken("param"):
        return  # nothing was hashed here: neither equal nor different
    parting.steps += 1
    agree = step.same("grad")
    parting.num_returns += agree and parting.apart
    parting.apart = not agree
    if not agree:
        parting.num_grad += 1
        if parting.grad_step is None:
            parting.grad_step = step.index
            parting.first_rows = tuple(r for r in step.rows if r is not None)
    for digest in ("param", "hyper", "none", "full"):
        if not step.same(digest):
            name = f"{digest}_step"
            if getattr(parting, name) is None:
                setattr(parting, name, step.index)
            if digest == "param":
                parting.num_param += 1


def _look_at_reducer(facts: Replicas, step: Step) -> None:
    if any(step.number("num_reduce")):
        facts.num_reduce += 1
        facts.silent_from, facts.num_silent = None, 0
    else:
        facts.silent_from = step.index if facts.silent_from is None else facts.silent_from
        facts.num_silent += 1


def unaveraged(facts: Replicas, opt: int) -> int | None:
    """The step from which on nobody averages the gradients of this optimizer's wrapped parameters, to the end of the run: DDP's reducer is silent,
    and what the script reduces by itself is too little. None where somebody does, or too few steps tell."""
    event = facts.params_event(opt)
    numel = sum(event["numels"] or ()) if event else 0
    if facts.silent_from is None or facts.num_silent < 2 or not numel:
        return None
    calls = [e for e in facts.run.present[0].of("coll") if e.step >= facts.silent_from and e["op"] in MOVERS and isinstance(e["numel"], int)]
    moved = sum(int(e["numel"] or 0) for e in calls)
    return facts.silent_from if moved < numel * max(1, facts.num_silent // 50 + 1) else None


def _name(facts: Replicas, parting: Parting) -> None:
    """Names of the parameters that differ, from the per-parameter digests at or after the first differing step."""
    run = facts.run
    first = run.present[0]
    keys = sorted({s for s, o in first.details if o == parting.opt})

    def differing(which: int, start: int | None) -> tuple[str, ...]:
        for key in keys:
            if start is None or key < start:
                continue
            columns = [r.details.get((key, parting.opt)) for r in run.present]
            if any(c is None for c in columns):
                continue
            tables = [_by_name(r.param_names(parting.opt, key), c[which]) for r, c in zip(run.present, columns, strict=True) if c is not None]
            found = tuple(n for n in tables[0] if all(n in t for t in tables) and len({t[n] for t in tables}) > 1)
            if found or all(t.keys() == tables[0].keys() for t in tables):
                return found  # else each rank holds parameters that the others may come to hold later: layers made at their first use
        return ()

    parting.grad_names = differing(0, parting.grad_step)
    parting.param_names = differing(1, parting.param_step)
    held = set.intersection(*(set(r.param_names(parting.opt, parting.grad_step)) for r in run.present))
    names = [n for n in first.param_names(parting.opt, parting.grad_step) if n in held]
    apart = set(parting.grad_names) if parting.grad_step is not None else set()
    parting.equal_grad_names = tuple(n for n in names if n not in apart)


def _by_name(names: Sequence[str], values: Sequence[int]) -> dict[str, int]:
    """Digests by parameter: ranks may hold others beside those that all have (tables of their own)."""
    return dict(zip(names, values, strict=False))


def _hand_synced(recording: Recording) -> int:
    """Elements that python-level reductions moved between the first and the last step: what a hand-written sync leaves behind."""
    return sum(
        int(e["numel"] or 0) for e in recording.of("coll")
        if isinstance(e["numel"], int) and e.step >= 1 and e["op"] in MOVERS
    )  # fmt: skip


def initial(run: Run, opt: int) -> list[tuple[int, ...]]:
    """Parameter digests before the first step, a rank each; empty where a rank told none."""
    found = []
    for recording in run.present:
        events = [e for e in recording.of("initial") if e["opt"] == opt]
        if not events:
            return []
        found.append(tuple(int(v) for v in events[0]["each"] or ()))
    return found


def initial_by_name(run: Run, opt: int) -> list[dict[str, int]]:
    """The same by name: ranks may hold tables of their own between what all have. Empty where a rank told none."""
    told = [next((e for e in r.of("initial") if e["opt"] == opt), None) for r in run.present]
    return [_by_name(r.param_names(opt, e.step), column) for r, e, column in zip(run.present, told, initial(run, opt), strict=False) if e is not None]


def starts_equal(run: Run, opt: int) -> bool:
    columns = initial(run, opt)
    return len(columns) > 1 and len(set(columns)) == 1


def changes(run: Run, what: str) -> list[tuple[int, Event]]:
    """ "wrap_changed" events of one kind."""
    return [(rank, e) for rank, e in run.events("wrap_changed") if e["what"] == what]


def listed(names: Sequence[str], limit: int = 4) -> str:
    """Names for a message: the first few, and how many more."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def majority_out(values: Sequence[object]) -> list[int]:
    """Positions that hold another value than most; empty where there is no majority."""
    counts = Counter(values).most_common()
    if len(counts) < 2 or counts[0][1] == counts[1][1]:
        return []
    return [i for i, v in enumerate(values) if v != counts[0][0]]


def require(run: Run, *, ddp: bool = False, messages: bool = False, together_first: bool = False) -> Replicas:
    """The facts, or NotApplicable with the reason why replicas cannot be compared. `messages`: the caller tells by itself what point-to-point
    messages carry. `together_first`: that the ranks agree before they first part is no sign of averages."""
    if run.world_size < 2:
        raise NotApplicable("one process: there are no replicas to compare")
    if len(run.present) < 2:
        raise NotApplicable("fewer than two ranks reported")
    if reason := regime.other(run):
        raise NotApplicable(reason)
    facts = of(run)
    if not facts.partings:
        raise NotApplicable("no optimizer step was taken by all ranks")
    if ddp and not facts.wrapped:
        raise NotApplicable("no model is wrapped in DistributedDataParallel")
    if any(p.num_param >= 0.5 * p.steps and agreements(run, opt, (p.param_step or 0) if together_first else 0) >= 2 for opt, p in facts.partings.items()):
        raise NotApplicable("local SGD: the script averages the parameters now and then, between steps that part them")
    if not messages and not facts.wrapped and any(p.num_param >= 0.5 * p.steps for p in facts.partings.values()) and regime.by_messages(run):
        raise NotApplicable("the ranks exchange by point-to-point messages and their models differ: gossip, or a pipeline")
    return facts


def reduction_failed(run: Run) -> bool:
    """Whether torch gave up with "expected to have finished reduction" on some rank."""
    return any("finished reduction" in str(e["message"]) for _, e in run.events(protocol.FAILURE))


def failure_note(run: Run) -> list[str]:
    return ["torch failed a step later: expected to have finished reduction"] if reduction_failed(run) else []


def has_unnamed(parted: set[str], names: Sequence[str]) -> bool:
    """Parameters that the optimizer knows under another root's name: compare the last parts."""
    return any(p.endswith(n) for p in parted for n in names)


def wrapping(run: Run) -> list[tuple[int, Event]]:
    """The first "wrapping" event of each rank; NotApplicable without two of them."""
    found = [(rank, r.of("wrapping")[0]) for rank, r in enumerate(run.ranks) if r is not None and r.of("wrapping")]
    if len(found) < 2:
        raise NotApplicable("no model is wrapped in DistributedDataParallel on several ranks")
    if reason := regime.other(run):
        raise NotApplicable(reason)
    return found


def strict_wrap(run: Run) -> Event:
    """The wrap event of a DDP that waits for every parameter."""
    if run.world_size < 2:
        raise NotApplicable("one process")
    wraps = [e for _, e in run.events("wrap")]
    if not wraps:
        raise NotApplicable("no model is wrapped in DistributedDataParallel")
    strict = [e for e in wraps if not e["find_unused"] and not e["static_graph"]]
    if len(strict) < len(wraps):
        raise NotApplicable("DDP was told to expect unused parameters")
    return strict[0]


def ungraded(run: Run) -> list[list[str]]:
    """A rank each: wrapped parameters that required a gradient and got none at the first such step; not those whose gradient came and was
    taken away by the script before the step."""
    columns: list[list[str]] = []
    for recording in run.present:
        lacking = ([str(n) for n in e["names"] or () if n not in set(e["taken"] or ())] for e in recording.of("no_gradient"))
        columns.append(next(filter(None, lacking), []))
    return columns if any(columns) else []


def taken_away(run: Run) -> list[set[tuple[int, str]]]:
    """A rank each: (step, parameter) whose gradient was there after the backward and None at the step."""
    return [{(e.step, str(n)) for e in r.of("no_gradient") for n in e["taken"] or ()} for r in run.present]


def ends_differ(run: Run) -> bool:
    """Whether the final parameter digests differ between ranks."""
    finals = [tuple(sorted((e["params"] or {}).items())) for r in run.present for e in r.of("full")[-1:]]
    return len(finals) > 1 and len(set(finals)) > 1


def same_pass(run: Run, step: int) -> bool:
    """Whether every rank was inside one pass over its loader at a step: not at an epoch's seam, or behind a pass that took a step a batch. A pass
    may end before its loader does, with a batch in hand: the ranks agreed that one of them has no more."""
    for recording in run.present:
        for event in recording.of("pass"):
            whole = event["complete"] or (number(event["steps"]) > 0 and number(event["num_batches"]) > number(event["steps"]))
            if event.step == step and whole and event["num_batches"] != event["steps"]:
                return False
    return True


def odd_site(events: Sequence[tuple[int, Event]], world_size: int) -> Where | None:
    """A statement that only some ranks ran."""
    ranks: dict[tuple[str, int], set[int]] = {}
    places: dict[tuple[str, int], Where] = {}
    for rank, event in events:
        if event.where is not None:
            key = (event.where.file, event.where.line)
            ranks.setdefault(key, set()).add(rank)
            places[key] = event.where
    return next((places[k] for k, r in ranks.items() if len(r) < world_size), None)


def final_names(run: Run) -> list[str]:
    """Parameters whose final digests differ between ranks."""
    tables = [e["params"] or {} for r in run.present for e in r.of("full")[-1:]]
    if len(tables) < 2:
        return []
    return [n for n in tables[0] if len({t.get(n) for t in tables}) > 1]


def carrying(run: Run, numels: Sequence[int], beside: int = 0) -> list[Event]:
    """Reductions on the first rank that carry all parameters at once, with at most so many numbers more in the same tensor, or each of them in turn."""
    if not numels or not run.present:
        return []
    reductions = [
        e
        for e in run.present[0].of("coll")
        if e["op"] in ("all_reduce", "all_gather", *protocol.GATHER_INTO, "reduce", "broadcast") and e.step >= 1
    ]
    whole = [e for e in reductions if 0 <= number(e["numel"]) - sum(numels) <= beside]
    if whole:
        return whole
    seen = {e["numel"] for e in reductions}
    return reductions if set(numels) <= seen and len(reductions) >= len(numels) else []


def agreements(run: Run, opt: int, since: int = 0) -> int:
    """Steps, behind the first or another one, before which the parameters agree between ranks: the script has averaged or sent them round."""
    tables = [{e.step: e["digest"] for e in r.of("before") if e["opt"] == opt and e.step > since} for r in run.present]
    common = set(tables[0]).intersection(*tables[1:]) if tables else set()
    return sum(len({t[s] for t in tables}) == 1 for s in common)
