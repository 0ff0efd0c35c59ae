"""Layers that behave otherwise in evaluation: Dropout, BatchNorm. Whether a trained model has any, and whether they were in train mode in
an evaluation pass.

Event "layers" (before the first step of an optimizer): opt, module, dropout, batchnorm (how many).
Event "step_mode" (when it changes): opt, training; whether the model of an optimizer is in train mode at its step.
Event "loop" (the same time): of="step", exits and ranges of the loops around the call of step(), see `origins.loops`.
Field `switch` of a "pass" without backward (first 6 of a process): {root_training, dropout, batchnorm: layers in train mode under a model
in train mode, body_random: the loop's body used the global generator although the script drew nothing itself, batchnorm_moved: statistics
were updated}.
"""

from __future__ import annotations

import weakref
from typing import Any

from .. import digests, origins, sites
from ..state import S
from . import manual, rng, steps

MAX_LOOKS = 6
_told: set[int] = set()
_modes: dict[int, bool] = {}
_looks = [0]


def roots() -> list[Any]:
    """Models that are trained: owners of optimizers' parameters, what DDP wraps, what is trained by hand."""
    refs = [*(r for w in list(steps._known.values()) for r in w.roots), *(w.ref for w in S.ddps), *manual._roots]
    found: dict[int, Any] = {}
    for ref in refs:
        root = ref()
        if root is not None:
            found[id(root)] = root
    return list(found.values())


def any_training() -> bool:
    found = roots()
    return not found or any(_in_train_mode(root) for root in found)


def count(root: Any) -> tuple[list[Any], list[Any]]:
    """(Dropout, BatchNorm modules) that are in train mode and would behave otherwise in eval mode."""
    import torch

    dropout_kinds = torch.nn.modules.dropout._DropoutNd
    norm_kinds = torch.nn.modules.batchnorm._BatchNorm
    modules = [m for m in root.modules() if m.training]
    return (
        [m for m in modules if isinstance(m, dropout_kinds) and m.p > 0],
        [m for m in modules if isinstance(m, norm_kinds) and m.track_running_stats and m.momentum is not None],
    )


class Body:
    """What the body of a loop over a loader did in its first batches, if it ran without gradients."""

    def __init__(self) -> None:
        self.mark: int | None = None
        self.draws = 0
        self.batches = 0
        self.random = self.moved = self.training = False
        self.num_dropout = 0
        self.norms: list[weakref.ref[Any]] = []
        self.tracked: int | None = None

    def begins(self, one: Any) -> None:
        """A batch was handed out."""
        if one.grad or one.backwards or self.batches >= 3 or (not self.batches and _looks[0] >= MAX_LOOKS):
            return
        if not self.batches:
            self._look()
        self.batches += 1
        self.mark, self.draws = _random_state(), rng.num_user_draws[0]

    def _look(self) -> None:
        _looks[0] += 1
        for root in roots():
            if root.training or _inner_trains(root):
                self.training = True
                dropout, norms = count(root)
                self.num_dropout += len(dropout)
                self.norms += [weakref.ref(m) for m in norms]
        self.tracked = _tracked(self.norms)

    def ends(self, one: Any) -> None:
        """The next batch is asked for."""
        if self.mark is None:
            return
        if rng.num_user_draws[0] == self.draws and _random_state() != self.mark:
            self.random = True
        self.mark = None
        self.moved = self.moved or (self.tracked is not None and _tracked(self.norms) != self.tracked)

    def told(self) -> dict[str, Any] | None:
        if not self.batches:
            return None
        return {
            "root_training": self.training, "dropout": self.num_dropout, "batchnorm": len(self.norms), "body_random": self.random,
            "batchnorm_moved": self.moved,
        }  # fmt: skip


def _tracked(norms: list[weakref.ref[Any]]) -> int | None:
    """Batches that BatchNorm layers have seen; None where the count lies on a device, which would be waited for."""
    counts = [m.num_batches_tracked for ref in norms if (m := ref()) is not None and m.num_batches_tracked is not None]
    if not counts or any(c.device.type != "cpu" for c in counts):
        return None
    return sum(int(c) for c in counts)


def _random_state() -> int:
    import torch

    digest = digests.wide(bytes(torch.default_generator.get_state().numpy().data))
    if torch.cuda.is_available() and S.group is not None and bool(torch.cuda.default_generators):
        digest ^= digests.wide(b"".join(bytes(g.get_state().numpy().data) for g in torch.cuda.default_generators))
    return digest


def _before_step(optimizer: Any, witness: Any, params: Any) -> None:
    """About 1 us; an event only where the mode has changed."""
    _note_mode(optimizer, witness)
    if witness.opt not in _told:
        _tell_layers(witness)


def _note_mode(optimizer: Any, witness: Any) -> None:
    training = True
    for ref in witness.roots:
        root = ref()
        training = training and (root is None or _in_train_mode(root))
    if _modes.get(witness.opt) != training:
        _modes[witness.opt] = training
        S.recorder.event("step_mode", opt=witness.opt, training=training)


def _in_train_mode(root: Any) -> bool:
    """A wrapper keeps a flag of its own: the model inside counts as well."""
    inner = vars(root)["_modules"].get("module")
    return bool(root.training) and (inner is None or bool(inner.training))


def _inner_trains(root: Any) -> bool:
    """The wrapper went to eval mode, and the model inside did not go along."""
    return any(w.ref() is root for w in S.ddps) and bool(root.module.training)


def _tell_layers(witness: Any) -> None:
    _told.add(witness.opt)
    dropout, norms, kinds = 0, 0, []
    for ref in witness.roots:
        root = ref()
        if root is not None:
            kinds.append(type(root).__name__)
            dropout += sum("Dropout" in type(m).__name__ and bool(getattr(m, "p", True)) for m in root.modules())
            norms += sum("BatchNorm" in type(m).__name__ for m in root.modules())
    stack = sites.stack(3)
    if stack and witness.opt < 4:
        S.recorder.event("loop", stack[0], of="step", **origins.loops(stack))
    S.recorder.event("layers", sites.UNKNOWN, opt=witness.opt, module=",".join(kinds), dropout=dropout, batchnorm=norms)


def arm() -> None:
    steps.at_step.append(_before_step)
    steps.at_light_step.append(_note_mode)
