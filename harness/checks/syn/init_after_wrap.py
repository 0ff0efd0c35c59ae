"""SYN125 init-after-wrap: wrapped parameters were changed between the wrap and the first step, differently on every rank

What it does
    Compares parameter digests right after DDP's constructor (equal: DDP broadcasts) with those before the first step.

Why it is bad
    DDP broadcasts once, when it is constructed. An initialisation after that, with a generator that differs by rank, gives every
    rank another model; gradients stay equal, so the difference stays for ever.

Wrong
    model = DDP(net)
    model.apply(init_weights)

Right
    net.apply(init_weights)
    model = DDP(net)

Known limits
    An equal change on all ranks is healthy and silent.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import in_hooks, replicas, rounding
from harness.model import Finding, Severity
from harness.record import Run


class InitAfterWrap(Check):
    code = "SYN125"
    name = "init-after-wrap"
    severity = Severity.ERROR
    explains = ("SYN127", "OPT111", "SYN126", "OPT114", "SYN129", "SYN115")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run, ddp=True)
        if in_hooks.updates(run):
            raise NotApplicable("parameters are updated inside of the first backward")
        for opt, parting in facts.partings.items():
            tables = replicas.initial_by_name(run, opt)
            wrapped = facts.ddp_names(opt)
            wrong = [n for n in (tables[0] if tables else ()) if n in wrapped and len({t[n] for t in tables if n in t}) > 1]
            changed = {n for kind in ("added", "rebound") for _, e in replicas.changes(run, kind) for n in e["names"] or ()}
            wrong = [n for n in wrong if not any(n.endswith(c) for c in changed)]
            if wrong:
                rounding.require_more(run, parting)
                yield self.finding(
                    f"{len(wrong)} wrapped parameters differ between ranks before the first step: DDP's broadcast was undone",
                    where=replicas.first_where(run, "apply")
                    or replicas.first_where(run, "load_state")
                    or replicas.first_where(run, "wrap"),
                    ranks=run.rank_ids,
                    notes=[replicas.listed(wrong)],
                    help="initialise or load before wrapping, or do it alike on every rank",
                )
                return
