"""Attempts to freeze that set an attribute nobody reads: `p.require_grad = False`, or `module.requires_grad = False`.

Event "misspelt" (at the first optimizer step): site (of the assignment), attribute, of ("parameter" | "module"), names (first 20), num.
A parameter has no attributes of its own, so this looks at empty dictionaries: once, 1 us a module.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import Any

from .. import cuts, names, sites, sources
from ..patching import contained
from ..state import S
from . import steps

MEANT = "requires_grad"
ALIKE = 0.8


def _is_meant(attribute: str) -> bool:
    return "grad" in attribute and SequenceMatcher(None, attribute, MEANT).ratio() >= ALIKE


@contained
def _look(optimizer: Any, witness: Any, params: Any) -> None:
    if S.steps:
        return
    found: dict[tuple[str, str], list[str]] = {}
    for root in names.root_modules():
        for name, module in root.named_modules():
            for attribute, value in vars(module).items():
                if value is False and _is_meant(attribute) and any(p.requires_grad for p in module.parameters()):
                    found.setdefault((attribute, "module"), []).append(name or type(module).__name__)
        for name, param in root.named_parameters():
            for attribute, value in vars(param).items():
                if value is False and attribute != MEANT and _is_meant(attribute) and param.requires_grad:
                    found.setdefault((attribute, "parameter"), []).append(names.clean(name))
    for (attribute, of), which in list(found.items())[:4]:
        S.recorder.event("misspelt", _assigned(attribute), attribute=attribute, of=of, names=which[:20], num=len(which))


def _assigned(attribute: str) -> sites.Site:
    return next((line for file in cuts.user_files()[: cuts.MAX_FILES] for line in sources.assignments(file, attribute)), sites.UNKNOWN)


def arm() -> None:
    steps.at_step.append(_look, 1)
