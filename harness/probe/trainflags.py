"""Modes of the modules that own an optimizer's parameters: one digest a step, and their names where it is another than at the last look."""

from __future__ import annotations

import weakref
from typing import Any

from . import digests, names
from .state import MASK, S

FIRST_STEPS = 16  # at each of them all modes are read: 70 us for 60 modules
EVERY = 4  # steps; after the first ones, while no mode is set: `vars(module)["training"] = ...` calls nothing
WALK_EVERY = 16  # steps; when the modules are looked up anew (180 us) although none was made or put in another place
num_switches = [0]  # modes that were set so far, of whatever module, by train() and eval() or by an assignment
num_placed = [0]  # modules that were put into another one so far
# Whether assignments are seen (sensors/edits.py). Where they are not, modes are read at every step: what one rank reads sooner than another, because
# it alone has called eval(), would differ for steps on end
is_told = [False]


class Modules:
    """The modules below the roots of one optimizer's parameters, and what was seen of them."""

    def __init__(self) -> None:
        self.refs: list[weakref.ref[Any]] = []
        self.num_made = (-1, -1)  # modules made, and put into another, in this process when they were looked up
        self.walked_at = self.read_at = 0  # steps
        self.num_switches = -1  # when their modes were read

    def is_known(self) -> bool:
        step = S.steps
        return (
            step >= FIRST_STEPS and is_told[0] and self.num_switches == num_switches[0] and self.num_made == _num_made()
            and step // EVERY == self.read_at // EVERY  # on all ranks the same steps, whatever one of them has read in between
        )  # fmt: skip

    def living(self, roots: list[weakref.ref[Any]]) -> list[Any]:
        if self.num_made == _num_made() and S.steps >= 8 and S.steps // WALK_EVERY == self.walked_at // WALK_EVERY:
            return [module for ref in self.refs if (module := ref()) is not None]
        found = [module for ref in roots if (root := ref()) is not None for module in names.modules_of(root)]
        self.refs, self.num_made, self.walked_at = [weakref.ref(module) for module in found], _num_made(), S.steps
        return found


def _num_made() -> tuple[int, int]:
    return names.num_made[0], num_placed[0]


def look(witness: Any) -> int:
    known: Modules = witness.modules
    if not known.is_known():
        digest = digests.wide(bytes([bool(module.training) for module in known.living(witness.roots)])) & MASK
        known.read_at, known.num_switches = S.steps, num_switches[0]
        if digest != witness.flags:
            witness.flags = digest
            _tell(witness)
    return int(witness.flags)


def _tell(witness: Any) -> None:
    if _told[0] < 64:
        _told[0] += 1
        roots = [r for ref in witness.roots if (r := ref()) is not None]
        still = [n for r in roots for n, m in r.named_modules() if not m.training]
        S.recorder.event("train_flags", opt=witness.opt, num_eval=len(still), eval=still[:20], tops=[r.training for r in roots])


_told = [0]
