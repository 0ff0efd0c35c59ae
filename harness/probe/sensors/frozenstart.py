"""Frozen parameters beside those that an optimizer holds, when it takes its first step behind a torch.load: whether what was read came to stand in them.

Event "frozen_initial" (first MAX_TOLD): opt, names, shapes, each (digests), of the parameters of the same models that are in no group of the optimizer and
have a name that is in a file which was loaded.
"""

from __future__ import annotations

from typing import Any

from .. import digests, names
from ..state import S
from . import saving, steps

MAX_TOLD, MAX_NAMES = 8, 400
_told = [0]


def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    if witness.began or _told[0] >= MAX_TOLD:
        return
    in_files = {names.clean(name.rsplit("/", 1)[-1]) for _, refs in saving._loaded for _, name in refs.values()}
    held = set(witness.ids)
    roots = [r for ref in witness.roots if (r := ref()) is not None]
    frozen = [(names.clean(n), p) for r in roots for n, p in r.named_parameters() if id(p) not in held and p.is_cpu and digests.plain(p)]
    found = [(n, p) for n, p in frozen if n in in_files][:MAX_NAMES]
    if found:
        _told[0] += 1
        each = digests.of_tensors([p for _, p in found])[1]
        S.recorder.event("frozen_initial", opt=witness.opt, names=[n for n, _ in found], shapes=[list(p.shape) for _, p in found], each=each)


def arm() -> None:
    steps.at_step.append(_at_step, when=saving._loaded)
