"""OPT122 parameter-in-no-optimizer: parameters receive gradients in every step and no optimizer holds them

What it does
    Looks, at some backwards of the whole run, at which parameters the loss reaches, and which of them no optimizer holds and nobody
    changes.

Why it is bad
    They stay as they were initialised, at full cost: lost by a filter of names when the groups were made, added to the model when the
    optimizer was there already, or in modules that the model keeps in a plain list, which are in no `parameters()`, no DDP and no checkpoint.

Wrong
    groups = [p for n, p in model.named_parameters() if n.endswith(('.weight', '.bias'))]     # not cls_token, pos_embed

    self.experts = [Expert(width) for _ in range(4)]                                             # not nn.ModuleList

Right
    seen = {id(p) for g in groups for p in g['params']}
    assert all(id(p) in seen for p in model.parameters() if p.requires_grad)

Known limits
    A part of a model that is left out as a whole may be frozen on purpose: that is advice. A model of which more is left out than is
    trained is not judged: a probe, or adapters, on a backbone that was not frozen. Nor are parameters that the script changes itself. Of plain
    lists those are judged whose several modules the constructor of a trained module makes itself: one module in a list, one in eval mode, or
    one that was given weights (fixed filters, a pretrained part) is left out on purpose.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks import regime
from harness.checks.base import Check, NotApplicable
from harness.checks.opt import optimizers
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Event, Run, where_of

CLEAR = {"sibling", "late", "own", "listed"}
MIN_STEPS = 4
REGISTER = "keep the modules in an `nn.ModuleList` (or `nn.ModuleDict`): then their parameters are the model's"
HAND_OVER = "hand them to the optimizer (`add_param_group`, or all of `model.parameters()`), or freeze them with `requires_grad_(False)`"


class Unstepped(Check):
    code = "OPT122"
    name = "parameter-in-no-optimizer"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        if not optimizers.by_opt(run):
            raise NotApplicable("no optimizer step was recorded")
        if reason := regime.other(run):
            raise NotApplicable(reason)
        last = [(r.num_steps, r.of("unstepped")[-1]) for r in run.present if r.of("unstepped")]
        if len(last) < len(run.present):
            return
        lost = [{str(p["name"]): p for p in _lasting(event, steps)} for steps, event in last]
        common = sorted(set(lost[0]).intersection(*lost[1:]))
        event = last[0][1]
        listed = [n for n in common if lost[0][n]["why"] == "listed"]
        if not common or (event["numel"] > event["governed"] and not listed):
            return
        clear = listed or [n for n in common if lost[0][n]["why"] in CLEAR]
        named = clear or common
        late = [n for n in named if lost[0][n]["why"] == "late"]
        yield self.finding(
            f"{len(named)} parameters receive a gradient in every step and are in no optimizer: {replicas.listed(named)}",
            where=(where_of(event["listed"]) if listed else where_of(event["made"]) if late else None) or optimizers.made_at(run),
            ranks=run.rank_ids,
            notes=_why(bool(listed), bool(late)) or [f"first seen at step {lost[0][named[0]]['since']}, unchanged since"],
            help=REGISTER if listed else HAND_OVER,
            severity=self.severity if clear else Severity.ADVICE,
        )


def _why(listed: bool, late: bool) -> list[str]:
    if listed:
        return ["their modules stand in a plain list, so the model, its checkpoint and DDP do not know them"]
    return ["their module was made after the optimizer"] if late else []


def _lasting(event: Event, steps: int) -> list[dict[str, object]]:
    """Parameters that were lost at two looks and over several steps."""
    return [p for p in event["params"] or () if p["name"] and p["why"] and p["looks"] >= 2 and steps - p["since"] >= MIN_STEPS]
