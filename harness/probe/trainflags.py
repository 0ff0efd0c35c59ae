"""Modes of the modules that own an optimizer's parameters: one digest a step, and their names where it is another than at the last step."""

from __future__ import annotations

from typing import Any

from . import digests, names
from .state import MASK, S, mix


def look(witness: Any) -> int:
    digest = 1
    for ref in witness.roots:
        root = ref()
        if root is not None:
            digest = mix(digest, digests.wide(bytes([bool(module.training) for module in names.modules_of(root)])))
    if digest != witness.flags:
        witness.flags = digest
        _tell(witness)
    return digest & MASK


def _tell(witness: Any) -> None:
    if _told[0] < 64:
        _told[0] += 1
        roots = [r for ref in witness.roots if (r := ref()) is not None]
        still = [n for r in roots for n, m in r.named_modules() if not m.training]
        S.recorder.event("train_flags", opt=witness.opt, num_eval=len(still), eval=still[:20], tops=[r.training for r in roots])


_told = [0]
