"""Which models are called during the first steps: a global forward pre-hook that is removed after step 3, so that later steps
cost nothing. Not installed where torch.compile is used: it would break the graph.

Event "others" (once, after the second step): models [{module, num, digest, first (the digest before the first step, 0: none), called, made (the
statement that made it)}] or parts of models that are neither wrapped nor in an optimizer.
Event "checkpoint": site, reentrant; torch.utils.checkpoint was used.
"""

from __future__ import annotations

from typing import Any

from .. import digests, lineage, modulehooks, names, sites
from ..arm import on_import
from ..patching import before
from ..state import S

LAST_STEP = 3
_hook: list[Any] = []
_called: set[int] = set()
_told = [False]
_first: dict[int, int] = {}  # id of a root module -> digest of its untrained parameters before the first step
_checkpoints: set[sites.Site] = set()


def start() -> None:
    """From the first module call on; see modes.py, which stops it when torch.compile appears."""
    import torch

    if not _hook and not S.compiling:
        _hook.append(torch.nn.modules.module.register_module_forward_pre_hook(_look))


def stop() -> None:
    modulehooks.remove(_hook)


def _look(module: Any, args: Any) -> None:
    if S.recorder.disabled or S.busy:
        return
    if S.steps >= LAST_STEP:
        stop()
        return
    _called.add(id(module))


def tell_others(optimizer: Any, witness: Any, params: Any) -> None:
    """Frozen models beside the trained one: DDP neither broadcasts nor averages them."""
    if _told[0] or S.steps not in (0, 2):
        return
    from . import steps

    trained = {i for w in list(steps._known.values()) for i in w.ids} | {i for w in S.ddps for i in w.refs}
    models = []
    for root in names.root_modules()[:64]:
        own = [p for p in root.parameters() if id(p) not in trained]  # of a model that is trained in part: the frozen rest
        if own and S.steps == 0:
            _first.setdefault(id(root), digests.of_tensors(own)[0])
        elif own:
            called = id(root) in _called or any(id(m) in _called for m in root.modules())
            digest, each = digests.of_tensors(own)
            buffers = digests.of_tensors(list(root.buffers()))[0]
            models.append({
                "module": type(root).__name__, "made": lineage.made_at(root), "num": len(each), "digest": digest, "buffers": buffers, "called": called,
                "first": _first.get(id(root), 0), "grad": any(p.requires_grad for p in own),
                "names": [n for n, p in root.named_parameters() if id(p) not in trained][:5],
            })  # fmt: skip
    if S.steps == 0:
        return
    _told[0] = True
    S.recorder.event("others", models=models)


def _arm_checkpoint(module: Any) -> None:
    def note(function: Any, *args: Any, **kwargs: Any) -> None:
        site = sites.here(4)
        if site not in _checkpoints and len(_checkpoints) < 64:
            _checkpoints.add(site)
            S.recorder.event("checkpoint", site, reentrant=kwargs.get("use_reentrant"))

    before(module, "checkpoint", note)


def arm() -> None:
    from . import steps

    start()
    steps.at_step.append(tell_others, LAST_STEP)
    on_import("torch.utils.checkpoint", _arm_checkpoint)
