"""Numbers that the script measures without gradients, losses and what it reads with item(): a reported number may be their mean.

Event "measured" (first 400; when something was synchronised since, at the next step, at the end): site, of ("loss" | "item"), num (calls), rows
(samples in them), mean (of the values), weighted (mean over the samples), total (sum over the samples), sum (of the values), targets
(digest of a loss's targets in order), first_t, last_t, at (steps so far), at_y. A stretch is a statement's calls between two
synchronisations. CPU tensors only: reading another would wait for the device. item() counts with gradients on as well, between an
evaluation and the next step.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from .. import digests, sites
from ..arm import at_close
from ..patching import quiet
from ..seethrough import traceable
from ..state import S, mix
from . import evaluation, steps

FUNCTIONS = (
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div",
)  # fmt: skip
MAX_TOLD, MAX_HASHED, MAX_OPEN = 400, 64, 16
_open: dict[tuple[str, sites.Site], Stretch] = {}
_moment = [(0, 0)]  # steps and synchronisations of what is open
_told = [0]


class Stretch:
    """Loss values of one statement between two synchronisations."""

    def __init__(self, of: str, site: sites.Site) -> None:
        self.of, self.site, self.at, self.y = of, site, S.steps, S.recorder.syncs
        self.num = self.rows = self.targets = 0
        self.sum = self.total = 0.0
        self.first_t = self.last_t = time.time_ns()

    def add(self, value: float, rows: int, mean: bool, target: Any) -> None:
        self.num += 1
        self.rows += rows
        self.sum += value
        self.total += value * rows if mean else value
        if target is not None and self.num <= MAX_HASHED:
            self.targets = mix(self.targets, digests.of_tensors([target])[0])
        self.last_t = time.time_ns()


def finish() -> None:
    for one in _open.values():
        _told[0] += 1
        S.recorder.event(
            "measured", one.site, of=one.of, num=one.num, rows=one.rows, mean=one.sum / one.num, weighted=one.total / max(1, one.rows),
            total=one.total, sum=one.sum, targets=one.targets, first_t=one.first_t, last_t=one.last_t, at=one.at, at_y=one.y,
        )  # fmt: skip
    _open.clear()


def _stretch(of: str, site: sites.Site) -> Stretch | None:
    now = (S.steps, S.recorder.syncs)
    if _moment[0] != now:
        finish()
        _moment[0] = now
    if (of, site) not in _open and site[0] and len(_open) < MAX_OPEN:
        _open[of, site] = Stretch(of, site)
    return _open.get((of, site))


@quiet
def _note(value: Any, target: Any, reduction: str, site: sites.Site) -> None:
    import torch

    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return  # inside vmap() it has no value of its own
    if value.numel() != 1 or value.device.type != "cpu" or not digests.plain(value) or not digests.plain(target):
        return
    one = _stretch("loss", site)
    if one is not None:
        one.add(float(value), int(target.shape[0]) if target.dim() else 1, reduction == "mean", target)


@quiet
def _note_item(value: float, site: sites.Site) -> None:
    one = _stretch("item", site)
    if one is not None:
        one.add(value, S.batch_rows, True, None)


def _make_item(original: Any) -> Any:
    import torch

    grad_enabled = torch.is_grad_enabled

    def item(self: Any) -> Any:
        value = original(self)
        if (
            (not grad_enabled() or evaluation._open)
            and S.steps
            and _told[0] < MAX_TOLD
            and type(value) in (int, float)
            and sites.is_user_code(sys._getframe(2).f_code)
        ):
            _note_item(float(value), sites.here(3))
        return value

    return item


def _make(original: Any) -> Any:
    import torch

    grad_enabled = torch.is_grad_enabled

    def measure(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not grad_enabled() and _told[0] < MAX_TOLD and len(args) + len(kwargs) > 1:
            target = args[1] if len(args) > 1 else kwargs.get("target")
            if target is not None:
                _note(result, target, str(kwargs.get("reduction", "mean")), sites.here(2))
        return result

    return measure


def arm() -> None:
    import torch
    import torch.nn.functional as functional

    for name in FUNCTIONS:
        traceable(functional, name, _make)
    traceable(torch.Tensor, "item", _make_item)
    steps.at_step.append(lambda optimizer, witness, params: finish(), when=_open)
    at_close.append(quiet(finish))
