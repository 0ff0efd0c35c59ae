"""OPT140 names-of-the-wrapper: parameters are chosen by name, and the names are those of the wrapped model

What it does
    Looks at loops over `named_parameters()` of a wrapper (DDP, DataParallel, what torch.compile returns) that test the name: `name.startswith("backbone.")`,
    `name in NO_DECAY`, `name.split(".")[0] == "head"`. A finding where a test comes to the same for every name of the wrapper, would tell them apart without
    its prefix, and the optimizer that steps shows it: a group without parameters, groups that are all alike, or nothing that is frozen. Else advice.

Why it is bad
    The names of a wrapped model begin with `module.` (`_orig_mod.`): no test ever holds, nobody says so, and a pretrained backbone trains with the
    head's learning rate.

Wrong
    model = DDP(model)
    for name, p in model.named_parameters():
        groups["backbone" if name.startswith("backbone.") else "head"].append(p)

Right
    for name, p in model.module.named_parameters(): ...      # or make the groups before the model is wrapped

Known limits
    Only loops in the first 256 steps, and tests of plain texts and containers of these. Silent where the function that loops names the
    prefix, or only asks any() or all() of the names, or puts another name into the loop's variable.
    A dict that is made of the names and asked for with `.get()` is not followed.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Event, Run, number, where_of

EFFECTS = {
    "group": "a group of the optimizer has no parameter, and all of them are in the others",
    "rates": "all groups of the optimizer are alike",
    "freeze": "every parameter of the model is trained",
}


class WrapperNames(Check):
    code = "OPT140"
    name = "names-of-the-wrapper"
    severity = Severity.ERROR

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(r.num_rows for r in run.present):
            raise NotApplicable("no step was taken")
        told = [(rank, e, w) for rank, e in run.events("wrapped_names") if (w := e.where) is not None]
        for function in dict.fromkeys((w.file, w.function, e["opt"]) for _, e, w in told):  # what makes the groups may ask several times
            here = [(rank, e) for rank, e, w in told if (w.file, w.function, e["opt"]) == function]
            first = next((e for _, e in here if e["effect"]), here[0][1])
            yield self._finding(first, sorted({rank for rank, _ in here}))

    def _finding(self, event: Event, ranks: list[int]) -> Finding:
        prefix, effect = str(event["prefix"]), str(event["effect"] or "")
        given_at = where_of(event["given_at"])
        place = event.where.place if event.where else ""
        return self.finding(
            f"`{event['test']}` is the same for every parameter: the names of the {event['wrapper']}'s parameters begin with `{prefix}`"
            + (f"; {EFFECTS[effect]}" if effect in EFFECTS else ""),
            where=given_at or event.where,
            ranks=ranks,
            severity=None if effect in EFFECTS else Severity.ADVICE,
            notes=[f"without `{prefix}` it tells {number(event['fits'])} of {number(event['num'])} names from the others" + (f" ({place})" if given_at else "")],
            help=f"name the parameters of the model inside, `{'model.module' if prefix == 'module.' else 'model._orig_mod'}.named_parameters()`, or make the "
            "groups before it is wrapped",
        )
