"""Evaluations, whoever owns the loop: forwards of a model that the script has put into eval mode.

Event "evaluated" (when the model goes back to train mode, before the next step, or at the end; first 100): site (of the first forward),
module, num_forwards, rows (samples in them), inputs (digest of the inputs in order), first_t, last_t, first_y, last_y, grad (gradients
were on), looped (a pass over a loader was open), weights [[module, digest of its parameters at its first forward]] (of the first evaluations, on the
CPU), wrapped ([that of one which DDP keeps equal on all ranks, backwards since the last step], empty where there is none), put_in [[its
digest at a later forward, where its weights were others and no backward came before, digest of the inputs from there on]]; stats, params, layers: its
running statistics, see statistics.py.
A global forward hook is there only while such a model is in eval mode, and not once something is compiled.
"""

from __future__ import annotations

import sys
import time
import weakref
from typing import Any

from .. import digests, sites
from ..arm import at_close
from ..patching import after, quiet
from ..state import S, mix
from . import statistics, steps

MAX_HASHED, MAX_WEIGHED = 64, 8
_weighed: dict[int, int] = {}  # id of a module -> evaluations of it that were weighed
_roots: dict[int, weakref.ref[Any]] = {}
_hook: list[Any] = []
_open: list[Evaluation] = []


class Evaluation:
    """Forwards in eval mode since the last training step."""

    def __init__(self, module: Any, site: sites.Site) -> None:
        self.module = type(module).__name__
        self.weights: dict[int, tuple[str, int]] = {}
        self.stats, self.params, self.layers = statistics.of(module)
        self.site = site
        self.num_forwards = self.num_hashed = self.rows = self.inputs = 0
        self.first_t = self.last_t = time.time_ns()
        self.first_y = self.last_y = S.recorder.syncs
        self.grad = self.looped = False
        self.wrapped: list[int] = []
        self.put_in: list[list[int]] = []
        self.watched: tuple[weakref.ref[Any], int] | None = None  # one parameter of it, what it was
        self.last: weakref.ref[Any] | None = None

    def weigh(self, module: Any) -> None:
        """About 4 us a parameter: at the first evaluations of each module only."""
        if _weighed.get(id(module), 0) >= MAX_WEIGHED:
            return
        if id(module) in self.weights:
            self._weigh_again(module)
            return
        _weighed[id(module)] = _weighed.get(id(module), 0) + 1
        params = list(module.parameters())
        if params and all(p.is_cpu for p in params):
            self.weights[id(module)] = (type(module).__name__, digests.of_tensors(params)[0])
            if any((w := d.ref()) is not None and module in (w, w.module) and not d.ignored for d in S.ddps):
                self.wrapped = [self.weights[id(module)][1], S.since.num_backward]
                trained = [p for p in params if p.requires_grad] or params
                self.watched = weakref.ref(trained[-1]), digests.of_tensors(trained[-1:])[0]

    def _weigh_again(self, module: Any) -> None:
        """The script may put other weights into the model between two loops. One parameter's digest tells, 4 us: its version does not, for `p.data.copy_`."""
        param = self.watched[0]() if self.watched is not None else None
        if self.watched is None or param is None or S.since.num_backward:
            return
        digest = digests.of_tensors([param])[0]
        if digest == self.watched[1]:
            return
        self.watched = self.watched[0], digest
        _weighed[id(module)] += 1
        self.put_in.append([digests.of_tensors(list(module.parameters()))[0], 0])
        self.num_hashed = 0

    def note(self, args: Any, kwargs: Any) -> None:
        import torch

        tensors = digests.of_batch((args, kwargs))
        if not tensors or (self.last is not None and self.last() is tensors[0]):  # a wrapper hands its input on to the model inside
            return
        self.last = weakref.ref(tensors[0])
        self.num_forwards += 1
        self.rows += int(tensors[0].shape[0]) if tensors[0].dim() else 1
        if self.num_hashed < MAX_HASHED and tensors[0].device.type == "cpu":
            digest = digests.of_tensors(tensors[:4])[0]
            self.num_hashed += 1
            if self.num_forwards <= MAX_HASHED:
                self.inputs = mix(self.inputs, digest)
            if self.put_in:
                self.put_in[-1][1] = mix(self.put_in[-1][1], digest)
        self.last_t, self.last_y = time.time_ns(), S.recorder.syncs
        self.grad = self.grad or torch.is_grad_enabled()
        self.looped = self.looped or bool(S.loops)


def finish() -> None:
    """Write what has been evaluated since the last training step."""
    while _open:
        one = _open.pop()
        if one.num_forwards:
            S.recorder.event(
                "evaluated", one.site, module=one.module, num_forwards=one.num_forwards, rows=one.rows, inputs=one.inputs,
                first_t=one.first_t,
                last_t=one.last_t, first_y=one.first_y, last_y=one.last_y, grad=one.grad, looped=one.looped,
                weights=[list(w) for w in one.weights.values()], wrapped=one.wrapped, put_in=one.put_in,
                stats=one.stats, params=one.params, layers=one.layers,
            )  # fmt: skip


def _after_train(result: Any, module: Any, mode: Any = True, *args: Any, **kwargs: Any) -> None:
    if not sites.switched_by_user(sys._getframe(2)) or S.compiling:
        return
    inner = getattr(module, "module", None)
    for one in (module, inner) if inner is not None and hasattr(inner, "forward") else (module,):
        if kwargs.get("mode", mode):
            _roots.pop(id(one), None)
        elif any(True for _ in one.children()):
            _roots[id(one)] = weakref.ref(one)
    if not _roots:
        finish()
    _set_hook()


def _set_hook() -> None:
    import torch

    if _roots and not _hook:
        _hook.append(torch.nn.modules.module.register_module_forward_pre_hook(_seen))
    elif not _roots and _hook:
        _hook.pop().remove()


def _seen(module: Any, args: Any) -> None:
    ref = _roots.get(id(module))
    if ref is not None and ref() is module and not S.busy:
        _note(module, args, sites.here(2))


@quiet
def _note(module: Any, args: Any, site: sites.Site) -> None:
    if module.training or S.compiling:
        return
    if not _open:
        _open.append(Evaluation(module, site))
    _open[0].weigh(module)
    _open[0].note(args, {})


def _before_step(optimizer: Any) -> None:
    if _open:
        finish()


def arm() -> None:
    import torch

    after(torch.nn.Module, "train", _after_train)
    steps.at_any_step.append(_before_step, when=_open)
    at_close.append(quiet(finish))
