"""DDP's communication hooks: what a rank's own gradients were before its hook reduced them. The averagers of local SGD.

Event "comm_hook": name, module of the function that was registered, start (first step of local SGD, of a state that has one). What a hook
replaces stands as `own` in the event "gradients" (backward.py): the first six steps, then every 16th, 64 in all: a hook may change its ways.
Event "model_averager": name; parameters are averaged now and then (local SGD). Event "averager_called" (first call of average_parameters):
name, period, warmup (steps).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from .. import digests, marks, sites
from ..arm import on_import
from ..patching import before, quiet, wrap
from ..state import S

FIRST_STEPS, EVERY, MAX_LOOKS = 6, 16, 64
SAMPLED_PARAMETERS, SAMPLED_ELEMENTS = 8, 6  # as backward.py samples them after the reduction
_own: dict[int, Any] = {}  # id of a parameter -> a few elements of its gradient before the hook; a copy
_wanted: list[Any] = [-1, set()]  # the step it was made at, ids of the parameters that are sampled
_looks = [0]
hooked = [False]


def due() -> bool:
    """Whether gradients before and after a hook are compared at this step."""
    step = S.steps
    return hooked[0] and not S.light and (step < FIRST_STEPS or step % EVERY == 0) and _looks[0] < MAX_LOOKS


def _sampled_ids() -> set[int]:
    if _wanted[0] != S.steps:
        _own.clear()
        ids: set[int] = set()
        for optimizer in marks.optimizers():
            trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad and p.is_floating_point()]
            ids.update(map(id, trained[:SAMPLED_PARAMETERS]))
        _wanted[:] = [S.steps, ids]
    found: set[int] = _wanted[1]
    return found


@quiet
def _look(bucket: Any) -> None:
    """A few elements of each sampled gradient; a device is not waited for."""
    if not due():
        return
    import torch

    ids = _sampled_ids()
    with torch.no_grad():
        for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if id(p) in ids and digests.plain(gradient):
                _own[id(p)] = digests.sampled(gradient, SAMPLED_ELEMENTS).clone()


def own(optimizer: Any) -> dict[str, list[float]]:
    """By position in the optimizer, as backward.py's samples; read once, at the step."""
    found: dict[str, list[float]] = {}
    params = [p for g in optimizer.param_groups for p in g["params"]] if _own else []
    for index, p in enumerate(params):
        if (sample := _own.pop(id(p), None)) is not None:
            found[str(index)] = [float(v) for v in sample.tolist()]
    _looks[0] += bool(found)
    return found


def _register(original: Any) -> Any:
    """Between DDP and its reducer: DDP itself keeps the user's own function."""

    def _register_comm_hook(reducer: Any, state: Any, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        hooked[0] = True

        def watched(state: Any, bucket: Any) -> Any:
            _look(bucket)
            S.in_hook += 1
            try:
                return hook(state, bucket)
            finally:
                S.in_hook -= 1

        return original(reducer, state, watched, *args, **kwargs)

    return _register_comm_hook


def _note(self: Any, state: Any, hook: Any, *args: Any, **kwargs: Any) -> None:
    start = getattr(state, "start_localSGD_iter", None)
    S.recorder.event(
        "comm_hook",
        sites.here(4),
        name=getattr(hook, "__name__", type(hook).__name__),
        module=getattr(hook, "__module__", ""),
        start=start if isinstance(start, int) else None,
    )


def _note_averager(self: Any, *args: Any, **kwargs: Any) -> None:
    S.recorder.event("model_averager", sites.here(4), name=type(self).__name__)


_called: set[int] = set()


def _note_call(self: Any, *args: Any, **kwargs: Any) -> None:
    if id(self) in _called:
        return
    _called.add(id(self))
    period, warmup = getattr(self, "period", None), getattr(self, "warmup_steps", None)
    periods = getattr(self, "_periods", None) or [period]
    told = [p for p in periods if isinstance(p, int)]
    S.recorder.event(
        "averager_called",
        sites.here(4),
        name=type(self).__name__,
        period=max(told, default=None),
        warmup=warmup if isinstance(warmup, int) else None,
    )


def _arm_averagers(module: ModuleType) -> None:
    before(module.ModelAverager, "__init__", _note_averager)
    before(module.PeriodicModelAverager, "average_parameters", _note_call)


def _arm_hierarchical(module: ModuleType) -> None:
    before(module.HierarchicalModelAverager, "average_parameters", _note_call)


def arm() -> None:
    import torch.distributed as untyped
    from torch.nn.parallel import DistributedDataParallel as DDP

    dist: Any = untyped
    if dist.is_available():
        wrap(dist, "_register_comm_hook", _register)
    before(DDP, "register_comm_hook", _note)
    package = "torch.distributed.algorithms.model_averaging."
    on_import(package + "averagers", _arm_averagers)
    on_import(package + "hierarchical_model_averager", _arm_hierarchical)
