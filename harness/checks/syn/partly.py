"""SYN128 gradients-partly-synced: a hand-written gradient sync leaves some parameters out

What it does
    In a job without DDP, looks for parameters whose gradients differ between ranks at every step while others' agree at every
    step, or go on agreeing where those begin to differ at some step, for good (gradients that were collected before `zero_grad()` set them to None,
    layers that were unfrozen later). The finding stands on the reduction that leaves them out; on the step of an optimizer that has a backward and no
    reduction of its own.

Why it is bad
    The parameters that were left out drift apart on every rank.

Wrong
    for p in model.encoder.parameters(): dist.all_reduce(p.grad)

Right
    for p in model.parameters(): dist.all_reduce(p.grad)

Known limits
    Needs gradients of some parameters that agree because somebody made them so: where they agree right after the backward, all ranks read
    the same data. Parameters of a module that starts different on each rank are its own (a slice of a layer, an expert), and experts with a
    group of ranks each, equal in the group from the start on, are healthy; where a reduction inside the backward carries an activation's
    gradient, the model may be split over the ranks: advice, and a warning where the script broadcast the parameters to all ranks before the first step
    and its forward gathers alone (a loss over the features of all ranks).
    Where gradients begin to differ at some step and fewer reductions are made from it on, the script has stopped them: advice (heads of each rank's own).
    Where as many go on and none of them carries what was reduced before, it is a warning.
    What the source leaves out by the name of its module (`"head" not in name` and a module `head`: private heads, normalisation of one's
    own) may be meant to be local and is advice; a module whose name merely holds the text (`multihead`) is not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from harness.checks import regime
from harness.checks.base import Check, NotApplicable
from harness.checks.syn import from_step, gradients, made_equal, reduced_copies, replicas
from harness.model import Finding, Severity, Where
from harness.probe import protocol
from harness.record import Run

OWN = "healthy where they are meant to be each rank's own from there on; else "


class PartlySynced(Check):
    code = "SYN128"
    name = "gradients-partly-synced"
    severity = Severity.ERROR
    provisional = True
    explains = ("SYN127", "SYN126", "OPT111")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run, together_first=True)
        if facts.wrapped:
            raise NotApplicable("a model is wrapped in DistributedDataParallel")
        if regime.by_rows(run):
            raise NotApplicable("tokens are exchanged by all_to_all: experts belong to one rank each")
        for opt, parting in sorted(facts.partings.items()):
            if parting.steps < 2 or not parting.num_param:
                continue
            synced, left = gradients.partly(run, opt)
            left = left or _unsampled(run, facts.of(opt))
            left = left if replicas.starts_equal(run, opt) else []  # parameters that were made equal are meant to stay so
            agree = gradients.agreeing(run, opt) if parting.grad_names and parting.equal_grad_names else set()
            agree = set() if gradients.equal_unsynced(run, opt, agree) else agree
            wrong = (
                [n for n in parting.grad_names if n not in agree] if agree and parting.num_grad == parting.steps else left if synced else []
            )
            lost = [n for n in from_step.lost(run, opt, parting) if n not in agree] if agree and not wrong else []
            wrong = wrong or lost
            wrong = [n for n in wrong if n not in in_teams(run, opt)] if wrong else []
            private = _private(run, opt)
            wrong = [n for n in wrong if n.rpartition(".")[0] not in private]
            if not wrong:
                continue
            alone = len(wrong) == len(run.present[0].param_names(opt)) and _has_own_backward(run, opt)
            sync = _sync_at(run)
            copied = reduced_copies.dropped(run, sync, wrong)
            where = (_steps_at(run, opt) if alone and not copied else None) or sync
            local = [n for n in wrong if _left_out_by_name(run, n)]
            if len(local) == len(wrong):
                yield self.finding(
                    f"{len(local)} parameters are each rank's own, as the source leaves them out by name: {replicas.listed(local)}",
                    where=where or facts.grad_site(opt),
                    ranks=run.rank_ids,
                    severity=Severity.ADVICE,
                    help="if they are not meant to be local, synchronise their gradients too",
                )
                return
            wrong = [n for n in wrong if n not in local]
            doubt = _doubt(run, opt, parting, wrong) if lost else None
            split = _split(run)
            sent = split is not None and made_equal.broadcast(run, wrong) and made_equal.only_gathered(run)
            shown = _held_as(run, opt)
            yield self.finding(
                f"the gradients of {len(wrong)} parameters are {f'not synchronised from step {parting.grad_step} on' if lost else 'never synchronised'}, "
                f"those of {len(agree or synced)} "
                f"others are: {replicas.listed([shown.get(n, n) for n in wrong])}",
                where=where or facts.grad_site(opt),
                ranks=run.rank_ids,
                severity=(Severity.WARNING if sent else Severity.ADVICE) if split is not None else doubt,
                notes=[
                    *(_of_a_split(split, sent) if split else []),
                    *([reduced_copies.NOTE] if copied else []),
                    *(["it is all that its optimizer holds: none of its gradients is synchronised before the step"] if alone else []),
                    f"parameters differ after {parting.num_param} of {parting.steps} steps",
                ],
                help=reduced_copies.HELP if copied else f"{OWN if doubt is Severity.ADVICE else ''}synchronise the gradient of every trained parameter",
            )
            return


def _doubt(run: Run, opt: int, parting: replicas.Parting, lost: Sequence[str]) -> Severity | None:
    """Of gradients that are not synchronised any more: whether the script means it (a head of each rank's own, from some epoch on)."""
    start = parting.grad_step or 0
    if not from_step.goes_on(run, opt, start):
        return Severity.ADVICE
    sure = from_step.without_gradients(run, opt, start, lost) or from_step.some_stale(run, opt, start, lost)
    return None if sure else Severity.WARNING


def _of_a_split(split: Where, sent: bool) -> list[str]:
    if sent:
        return ["they are no slices of a model that is split: the script broadcast them to all ranks before the first step"]
    return [f"an activation's gradient is reduced inside the backward ({split.place}): they may be slices of a model that is split"]


def in_teams(run: Run, opt: int) -> set[str]:
    """Parameters of which teams of ranks have a model each, replicated in the team: they start equal in a team and differ between teams, and so do
    their gradients at every step whose details were kept (experts, of which each has its own group)."""
    names, starts = run.present[0].param_names(opt), replicas.initial(run, opt)
    keys = [k for k in run.present[0].details if k[1] == opt and all(k in r.details for r in run.present)]
    if len(run.present) < 4 or not starts or len(keys) < 3 or any(r.param_names(opt) != names for r in run.present):
        return set()
    found = set()
    for i, name in enumerate(names):
        begin = _teams([s[i] if i < len(s) else 0 for s in starts])
        steps = [_teams([r.details[k][0][i] if i < len(r.details[k][0]) else 0 for r in run.present]) for k in keys]
        if 1 < len(set(begin)) <= len(begin) // 2 and min(Counter(begin).values()) > 1 and all(s == begin for s in steps):
            found.add(name)
    return found


def _teams(values: Sequence[int]) -> list[int]:
    """The first rank that holds the same value, a rank each."""
    return [values.index(v) for v in values]
def _private(run: Run, opt: int) -> set[str]:
    """Modules that hold a parameter which starts different on each rank: slices, or experts, that a rank has for itself. None where no
    parameter starts equal: nobody made them alike then."""
    starts = replicas.initial(run, opt)
    names = run.present[0].param_names(opt)
    if not starts or any(len(s) != len(names) for s in starts):
        return set()
    apart = {n for n, *values in zip(names, *starts, strict=True) if len(set(values)) == len(values)}
    return {n.rpartition(".")[0] for n in apart} if len(apart) < len(names) else set()


def _split(run: Run) -> Where | None:
    """A reduction that autograd calls, at several steps, of what is no gradient of a parameter by its size: an activation's."""
    numels = {n for _, e in run.events(protocol.PARAMS) for n in e["numels"] or ()}
    steps: dict[Where, set[int]] = {}
    for e in run.present[0].of("coll"):
        if e["inside"] and not e["grad"] and e["numel"] not in numels and e.where is not None:
            steps.setdefault(e.where, set()).add(e.step)
    return next((where for where, at in steps.items() if len(at) > 1), None)


def _left_out_by_name(run: Run, name: str) -> bool:
    """Whether a filter in the source names one of the modules on the way to this parameter: all of it, or up to a number (`bn`, `bn1`)."""
    texts = {str(t).strip(".") for _, e in run.events("name_filters") for t in e["excluded"] or ()}
    modules = name.split(".")[:-1]  # `"bias" not in name` sorts out what has no weight decay
    paths = [".".join(modules[i:]) for i in range(len(modules))]
    return any(re.match(rf"{re.escape(t)}[\d_]*(\.|$)", p) for t in texts if t for p in paths)


def _unsampled(run: Run, parting: replicas.Parting) -> list[str]:
    """Of an optimizer whose gradients are only hashed, as sparse ones are: those that differ, where none of them ever agrees."""
    never = parting.num_grad == parting.steps and not parting.equal_grad_names
    return list(parting.grad_names) if never and not any(e["local"] for e in run.present[0].of("gradients") if e["opt"] == parting.opt) else []


def _steps_at(run: Run, opt: int) -> Where | None:
    """The step of this optimizer."""
    return next((e.where for e in run.present[0].of("gradients") if e["opt"] == opt and e.where is not None), None)


def _has_own_backward(run: Run, opt: int) -> bool:
    """Between its backward and its step nothing is communicated: no reduction is there that could have skipped its gradients."""
    rows = [r for r in run.present[0].all_rows() if r.opt == opt]
    return bool(rows) and all(r.num_backward and not r.num_coll for r in rows[:6])


def _held_as(run: Run, opt: int) -> dict[str, str]:
    """What the script calls tensors that no module owns."""
    told = [e["held_as"] for e in run.present[0].of(protocol.PARAMS) if e["opt"] == opt]
    return {str(k): str(v) for held in told if isinstance(held, dict) for k, v in held.items()}


def _sync_at(run: Run) -> Where | None:
    """The reduction of the gradients: of one that is a parameter's, else the statement that moves most elements (flat buffers)."""
    told = [e for e in run.present[0].of("coll") if e.step >= 1 and (e["grad"] or not e["inside"])]
    calls = [e for e in told if e["op"] in ("all_reduce", "reduce", "reduce_scatter", *protocol.REDUCE_SCATTER_INTO)]
    moved: Counter[Where] = Counter()
    for e in [e for e in calls if e["grad"]] or calls:
        if e.where is not None and isinstance(e["numel"], int):
            moved[e.where] += e["numel"]
    return moved.most_common(1)[0][0] if moved else None
