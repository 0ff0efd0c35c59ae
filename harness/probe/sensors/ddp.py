"""What DistributedDataParallel wraps, and what happens to it afterwards.

Event "wrapping" (before the constructor): names, shapes, numels in registration order, each (digests), digest (of all).
Event "wrap" (after it): index, module, of_size (ranks of the wrapper that was given for a model), names, requires_grad, dtypes, devices,
device_ids, find_unused, static_graph, broadcast_buffers,
buffers, each (parameter digests after DDP's own broadcast), group_size, comm_hook.
Event "wrap_changed": index, what ("added" | "rebound" | "tied" to another parameter | "removed" | "unfrozen" | "frozen" | "cast"), names;
`site` is the statement where it is known.
Event "wrap_eval": index, buffers {name: digest} at a forward in eval mode (first 20), inner (the model was called around DDP).
Event "wrap_moved": index, site, data; a cast or move after wrapping gave parameters new storage: DDP's hooks sit on the old accumulators. `data`:
seen at a forward only (`p.data = ...`, which may have kept the accumulators); then the site is that of an assignment, or of the forward.
Event "apply": site; `module.apply(fn)` after wrapping.
Event "bypass": index; a backward reached parameters of a wrapped module whose forward DDP did not run since the last step.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from .. import bufferwrites, cuts, digests, names, sites, sources
from ..patching import after, before, contained, quiet, wrap
from ..state import S, mix
from . import edits, graphs, inputs, ownscales


def note_inner_eval(module: Any) -> None:
    """A wrapped model evaluated around DDP: its buffers are what this rank's last forward left, no broadcast came between."""
    wrapped = next((w for w in S.ddps if (m := w.ref()) is not None and m.module is module), None)
    if wrapped is None or wrapped.eval_looks >= 20:
        return
    table = dict(module.named_buffers())
    if table:
        wrapped.eval_looks += 1
        each = digests.of_tensors(list(table.values()))[1]
        S.recorder.event("wrap_eval", sites.here(4), index=wrapped.index, inner=True, buffers=dict(zip(table, each, strict=True)))


class Wrapped:
    """One DDP object: weak references, so that the probe keeps nothing alive."""

    def __init__(self, model: Any, index: int) -> None:
        self.ref = weakref.ref(model)
        self.index = index
        named = list(model.module.named_parameters())
        self.names = {id(p): names.clean(n) for n, p in named}
        self.refs = {id(p): weakref.ref(p) for _, p in named}
        self.grad = {id(p): p.requires_grad for _, p in named}
        self.dtypes = {id(p): (p.dtype, p.device) for _, p in named}
        self.ignored = set(getattr(model, "parameters_to_ignore", ()) or ())
        self.moved_at: sites.Site | None = None
        self.pointers: list[int] = []  # of the first parameters, at the last forward
        self.data_told = False
        self.reported: set[tuple[str, str]] = set()
        self.forwards = 0  # since the last step
        self.graded = False  # one of them made a graph
        self.armed = False  # and found require_backward_grad_sync set: DDP reads it there, not in the backward
        self.eval_looks = 0
        self.num_entered = self.num_edits = 0  # forwards, and edits before the last look for changes
        self.buffer_value = 0
        norm = _norm_modules(model.module)
        self.own_buffers: list[str] = [
            n for n, b in model.module.named_buffers() if n.rsplit(".", 1)[0] not in norm and b.is_floating_point()
        ]

    def knows(self, param: Any) -> bool:
        """Whether DDP saw this very Parameter object when it was constructed."""
        ref = self.refs.get(id(param))
        return ref is not None and ref() is param


def _norm_modules(module: Any) -> set[str]:
    import torch

    return {n for n, m in module.named_modules() if isinstance(m, torch.nn.modules.batchnorm._NormBase)}


def wrap_of(param: Any) -> int:
    """Index of the newest living wrap event that covers this parameter; -1: none, or DDP was told to ignore it."""
    for wrapped in reversed(S.ddps):
        if wrapped.knows(param) and wrapped.ref() is not None and wrapped.names[id(param)] not in wrapped.ignored:
            return int(wrapped.index)
    return -1


def buffer_digest(step: int) -> int:
    """Buffers of the wrapped modules that are not a normalisation's own statistics, as of the last training forward."""
    digest = 0
    for wrapped in S.ddps:
        digest = mix(digest, wrapped.buffer_value) if wrapped.buffer_value else digest
    return digest


def _before_init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    S.recorder.enter("ddp_init", site := sites.here(4))
    named = list(module.named_parameters())
    digest, each = digests.of_tensors([p for _, p in named])
    S.recorder.event(
        "wrapping",
        site,
        module=type(module).__name__,
        names=[names.clean(n) for n, _ in named],
        shapes=[list(p.shape) for _, p in named],
        numels=[p.numel() for _, p in named],
        each=each[:4096],
        digest=digest,
    )


def _after_init(result: Any, self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    S.recorder.leave()
    index = len(S.ddps)
    wrapped = Wrapped(self, index)
    S.ddps.append(wrapped)
    S.recorder.syncs += 1
    named = list(module.named_parameters())
    S.recorder.event(
        "wrap",
        sites.here(4),
        index=index,
        module=type(module).__name__,
        of_size=module.process_group.size() if isinstance(module, type(self)) else None,
        names=[names.clean(n) for n, _ in named],
        requires_grad=[p.requires_grad for _, p in named],
        numels=[p.numel() for _, p in named],
        dtypes=sorted({str(p.dtype).removeprefix("torch.") for _, p in named}),
        devices=sorted({str(p.device) for _, p in named}),
        device_ids=[str(d) for d in (self.device_ids or [])],
        find_unused=bool(self.find_unused_parameters),
        static_graph=bool(getattr(self, "static_graph", False)),
        broadcast_buffers=bool(self.broadcast_buffers),
        own_buffers=wrapped.own_buffers[:50],
        own_buffer_site=bufferwrites.place(module, wrapped.own_buffers),
        buffers=[n for n, _ in module.named_buffers()][:200],
        each=digests.of_tensors([p for _, p in named])[1][:4096],
        group_size=self.process_group.size(),
        group_ranks=_team(self.process_group),
        batchnorms=sum(1 for m in module.modules() if "BatchNorm" in type(m).__name__),
        sync_batchnorms=sum(1 for m in module.modules() if type(m).__name__ == "SyncBatchNorm"),
    )
    edits.watch()
    for look in at_wrap:
        look(wrapped)


at_wrap: list[Any] = []  # sensors that are told what was wrapped: (Wrapped)


def _team(group: Any) -> list[int] | None:
    """The ranks that average with each other, where they are not all."""
    import torch.distributed as dist

    return sorted(dist.get_process_group_ranks(group)) if group.size() < dist.get_world_size() else None


def _apply(original: Any) -> Any:
    """A cast or move (`.to`, `.half`, ...) after wrapping replaces the gradient accumulators that DDP hooked;
    one that changes nothing does not."""
    look, note = quiet(_pointers), quiet(_note_move)

    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        wrapped = [w for w in S.ddps if (m := w.ref()) is not None and (self is m or self is m.module)]
        old = [look(w) for w in wrapped]
        result = original(self, *args, **kwargs)
        for one, pointers in zip(wrapped, old, strict=True):
            note(one, pointers, sites.here(3))
        return result

    return apply


def _pointers(wrapped: Wrapped) -> list[int]:
    """Addresses of the first parameters' storages. Raises for a tensor without one (fake, or a subclass's own)."""
    return [p.data_ptr() for ref in list(wrapped.refs.values())[:4] if (p := ref()) is not None]


def _note_move(wrapped: Wrapped, old: list[int] | None, site: sites.Site) -> None:
    if old is not None and _pointers(wrapped) != old:
        wrapped.moved_at = site
        edits.num_edits[0] += 1
        S.recorder.event("wrap_moved", site, index=wrapped.index)


def _note_apply(module: Any, *args: Any, **kwargs: Any) -> None:
    if (
        S.ddps
        and sites.is_user_code(sys._getframe(3).f_code)
        and any((m := w.ref()) is not None and module in (m, m.module) for w in S.ddps)
    ):
        S.recorder.event("apply", sites.here(4))


def _look_for_data(wrapped: Wrapped, site: sites.Site) -> None:
    """Storages that the script has put in place of others by itself: `p.data = ...` calls nothing that could be hooked."""
    old, wrapped.pointers = wrapped.pointers, _pointers(wrapped)
    if old and old != wrapped.pointers and wrapped.moved_at is None and not wrapped.data_told:
        wrapped.data_told = True
        found = next((s for f in (site[0], *cuts.user_files()[: cuts.MAX_FILES]) for s in sources.assignments(f, "data")), site)
        S.recorder.event("wrap_moved", found, index=wrapped.index, data=True)


def _is_as_wrapped(wrapped: Wrapped, module: Any) -> bool:
    """Whether every parameter is there and as it was, without a look at names."""
    seen: set[int] = set()
    for one in names.modules_of(module):
        for p in vars(one)["_parameters"].values():
            if p is not None and (key := id(p)) not in seen:
                if not wrapped.knows(p) or p.requires_grad != wrapped.grad[key] or (p.dtype, p.device) != wrapped.dtypes[key]:
                    return False
                seen.add(key)
    return len(seen) == len(wrapped.names)


def _look_for_changes(wrapped: Wrapped, model: Any, site: sites.Site) -> None:
    """Parameters that came, went or changed since the wrap; up to 4 us a parameter, see _is_due."""
    contained(_look_for_data)(wrapped, site)
    if _is_as_wrapped(wrapped, model.module):
        return
    found: dict[str, list[str]] = {}
    seen: set[int] = set()
    for name, p in list(model.module.named_parameters()):
        key = id(p)
        seen.add(key)
        if not wrapped.knows(p):
            old = [i for i, n in wrapped.names.items() if n == names.clean(name)]
            found.setdefault("rebound" if old else "added", []).append(name)
        elif p.requires_grad != wrapped.grad[key]:
            found.setdefault("unfrozen" if p.requires_grad else "frozen", []).append(name)
        elif (p.dtype, p.device) != wrapped.dtypes[key]:
            found.setdefault("cast", []).append(name)
    if not found.keys() & {"rebound", "added"} and len(seen) < len(wrapped.names):
        for name in (n for i, n in wrapped.names.items() if i not in seen):
            found.setdefault("tied" if _attribute(model.module, name) in seen else "removed", []).append(name)
    for what, which in found.items():
        fresh = [n for n in which if (what, n) not in wrapped.reported]
        if fresh:
            wrapped.reported.update((what, n) for n in fresh)
            S.recorder.event(
                "wrap_changed",
                _edit_site(wrapped, model, what, fresh, site),
                index=wrapped.index,
                what=what,
                names=fresh[:100],
                seen_at=sites.as_json(site),
            )


def _attribute(module: Any, name: str) -> int:
    """id of what a parameter's name leads to now; of None where it leads nowhere."""
    for part in name.split("."):
        module = getattr(module, part, None)
    return id(module)


def _edit_site(wrapped: Wrapped, model: Any, what: str, which: list[str], fallback: sites.Site) -> sites.Site:
    if what in ("unfrozen", "frozen") and edits.of_flags:
        return edits.of_flags[-1]
    if what in ("unfrozen", "frozen"):
        assigned = sources.assignments(fallback[0], "requires_grad")
        if assigned:
            return assigned[0]
    if what == "cast" and wrapped.moved_at is not None:
        return wrapped.moved_at
    for name in which:
        owner, _, attribute = name.rpartition(".")
        while True:
            try:
                site = edits.of_attributes.get((id(model.module.get_submodule(owner)), attribute))
            except AttributeError:
                site = None
            if site is not None:
                return site
            if not owner:
                break
            owner, _, attribute = owner.rpartition(".")
    return fallback


def _wrapped_of(model: Any) -> Wrapped | None:
    for wrapped in S.ddps:
        if wrapped.ref() is model:
            found: Wrapped = wrapped
            return found
    return None


def _entered(wrapped: Wrapped, model: Any, args: Any, kwargs: Any) -> None:
    """Before a forward, at steps with digests."""
    if model.training or S.steps < 4:
        tensors = digests.of_batch((*args, *kwargs.values()))
        if model.training and wrapped.index == 0:
            ownscales.note(tensors)
        if tensors and tensors[0].device.type == "cpu":  # a device batch would be waited for
            digest = digests.of_tensors(tensors[:4])[0]
            S.since.batch = mix(S.since.batch, digest)
            if model.training:
                inputs.note(wrapped.index, digest)
            S.batch_rows = int(tensors[0].shape[0]) if tensors[0].dim() else 1
    if _is_due(wrapped):
        _look_for_changes(wrapped, model, sites.here(4))


def _is_due(wrapped: Wrapped) -> bool:
    """Every forward at first, then every 8th and 16th; a short run may end before, so at the first 64 also one before which something was put in, a
    parameter's requires_grad_() was called, or a step had gradients of other parameters than the one before it."""
    wrapped.num_entered = num = wrapped.num_entered + 1
    before, wrapped.num_edits = wrapped.num_edits, edits.num_edits[0]
    return num <= 8 or num % (8 if num <= 64 else 16) == 0 or (num <= 64 and before != wrapped.num_edits)


def _raised(wrapped: Wrapped, model: Any) -> None:
    """A forward after which there may be none: its reducer waits for the gradient of a parameter that was frozen since the last look."""
    _look_for_changes(wrapped, model, sites.here(4))


def _left(wrapped: Wrapped, model: Any, output: Any) -> None:
    training = model.training
    graphs.watch(output, "train" if training else "eval")
    if training and wrapped.own_buffers and (S.steps < 64 or S.steps % 16 == 0):
        table = dict(model.module.named_buffers())
        wrapped.buffer_value = digests.of_tensors([table.get(n) for n in wrapped.own_buffers])[0]
    elif not training and wrapped.eval_looks < 20:
        wrapped.eval_looks += 1
        table = dict(model.module.named_buffers())
        each = digests.of_tensors(list(table.values()))[1]
        if table:
            S.recorder.event("wrap_eval", sites.here(4), index=wrapped.index, buffers=dict(zip(table, each, strict=True)))


def _forward(original: Any) -> Any:
    import torch

    entered, left, raised = quiet(_entered), quiet(_left), quiet(_raised)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder, wrapped = S.recorder, _wrapped_of(self)
        if wrapped is None or recorder.disabled or S.at_work.yes:
            return original(self, *args, **kwargs)
        if not S.dark:
            S.since.num_forward += 1
            wrapped.forwards += 1
            if torch.is_grad_enabled():
                wrapped.graded = True
                wrapped.armed = wrapped.armed or self.require_backward_grad_sync
        if not S.light:
            entered(wrapped, self, args, kwargs)
        recorder.enter("ddp_forward", None)  # where it is the beat finds out, should it last
        try:
            output = original(self, *args, **kwargs)
        except Exception:
            raised(wrapped, self)
            raise
        recorder.leave()
        if not self.training or not graphs.idle() or not (S.dark or (S.light and S.steps % 16)):
            left(wrapped, self, output)
        return output

    return forward


_module_access: list[tuple[int, sites.Site]] = []  # (step, statement) of the user's last `ddp.module`


def last_module_access() -> sites.Site | None:
    """The statement that reached into `ddp.module` since the last step, if any."""
    return _module_access[-1][1] if _module_access and _module_access[-1][0] == S.steps else None


def _getattr(original: Any) -> Any:
    def __getattr__(self: Any, name: str) -> Any:
        if name == "module" and not S.dark and sites.is_user_code(sys._getframe(1).f_code) and self.training:
            _module_access[:] = [(S.steps, sites.here(2))]
        return original(self, name)

    return __getattr__


def arm() -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel as DDP

    before(DDP, "__init__", _before_init)
    after(DDP, "__init__", _after_init)
    wrap(DDP, "forward", _forward)
    DDP.__getattr__ = _getattr(torch.nn.Module.__getattr__)  # type: ignore[method-assign]
    wrap(torch.nn.Module, "_apply", _apply)
    before(torch.nn.Module, "apply", _note_apply)
