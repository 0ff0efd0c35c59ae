"""backward(): the loss it is called on, who is in the middle of no_sync, whether DDP's reducer communicated, what the gradients were before a
hand-written sync.

Event "loss" (first time a call site is seen, and when its shape changes): site, root (names of the last operations), reduction ("mean" |
"sum" | "none" | ""), scaled (a scalar factor or quotient at the root), terms (of a scaled one, see ownmeans.py), numel, scaler, rows,
made (the statement that made the loss), joined (a collective was given a tensor of this graph: the ranks share the loss).
Event "accumulation" (first 24 steps, and 16 later ones of another number of backwards): sites: [[site, backwards since the gradients were zero]],
opt, reduces, no_sync, dropped (see thrown.py).
Event "gradients" (first 6 steps, more under a communication hook): site (of the step), opt, names {position: name}, own (values before DDP's communication hook,
where there is one), hooked (before the script's own hooks, where there are any), local (sampled values after the last backward), synced (the same
elements before a clip, or at the step), at_step, weights (sampled parameters on the CPU right before the first six steps).
Event "divisor" (first 24 steps, each backward): site, made (the statement that divides), value (whole; of the loss or of each term), factors (of the terms).
Event "autograd_grad": site; torch.autograd.grad was asked for gradients of parameters of a wrapped module.
"""

from __future__ import annotations

import time
from typing import Any

from .. import digests, hookedgrads, marks, names, ownmeans, roots, samplevalues, sites, sources, zeroing
from ..looks import Looks
from ..patching import after, contained, quiet, wrap
from ..state import S, seq
from . import assigned, comm_hooks, dark, ddp, graphs, manual, queue, reached, scales, steps, thrown

at_backward = Looks()  # sensors that look at the loss of the first 256 backwards
at_left = Looks()  # the same after it
at_zero_grad = Looks()  # sensors that are told of an optimizer's zero_grad()
_seen: dict[tuple[str, int], str] = {}
_since_zero: dict[sites.Site, int] = {}
_local: dict[int, dict[str, list[float]]] = {}
_unclipped: dict[int, dict[str, list[float]]] = {}
_item: list[Any] = [lambda loss: loss.item()]  # torch's own, not what other sensors put in its place
GRADIENT_STEPS = 6
UNGRADED_STEPS = steps.UNGRADED_STEPS


def _describe(loss: Any, site: sites.Site) -> None:
    from_scaler = scales.from_scaler(loss)
    base = from_scaler[1]() if from_scaler is not None else loss
    whole = base if base is not None else loss
    chain, reduction, scaled = roots.root_of(whole)
    if reduction == "sum" and ((S.since.num_backward and roots.is_surrogate(loss)) or roots.of_terms(whole, S.batch_rows)):
        reduction = ""
    key = (site[0], site[1])
    text = f"{chain[:3]}{reduction}{scaled}"
    if _seen.get(key) != text and len(_seen) < 200:
        _seen[key] = text
        S.recorder.event(
            "loss",
            site,
            root=chain,
            reduction=reduction,
            scaled=scaled,
            terms=ownmeans.terms_of(whole),
            numel=int(loss.numel()),
            scaler=from_scaler is not None,
            rows=S.batch_rows,
            joined=S.since.joined or (S.since.num_coll > 0 and roots.has_function(loss)),
            made=sites.as_json(sources.loss_made_at(site[0], site[1]) or sites.UNKNOWN),
        )


def _after_zero_grad(result: Any, optimizer: Any, set_to_none: bool = True) -> None:
    if S.light:  # nobody asks
        return
    for look in at_zero_grad.due(S.steps):
        look(optimizer)
    m = marks.of(optimizer)
    m.cleared = bool(set_to_none)
    if m.on_device or (not m.num_steps and zeroing.on_device(optimizer)):
        m.zeroed = True


def _enter(loss: Any, site: sites.Site, given: Any = None) -> None:
    if S.backwards <= 256:
        S.since.given = given is not None
        for look in at_backward.due(S.steps):
            look(loss)
    if manual._leaves:  # a step without an optimizer shows only now
        manual.look()
    since = S.since
    if not since.first_sync:
        queue.at_sync(since)
    if S.light:
        for m in list(marks.table.values()):
            m.zeroed = True  # not looked at
    else:
        _look_at_gradients(site)
    if reached.due():
        reached.look(loss)
    since.num_backward += 1
    S.backwards += 1
    S.loss, S.loss_site = _value(loss) if given is None or loss.numel() == 1 else None, site  # else an output between two stages of a pipeline
    S.loss_scale = scales.scale_of(loss) or 1.0
    if loss.grad_fn is not None:
        if S.steps < 24 and given is None and (divisor := roots.divisor_of(loss)) is not None:
            made = site if "/" in sites.text(site) else sources.loss_made_at(site[0], site[1]) or site
            S.recorder.event("divisor", site, made=sites.as_json(made), value=divisor[0], factors=divisor[1])
        if site[:2] not in _seen or (not S.light and (S.backwards < 64 or S.backwards % 5 == 0)):  # of two losses in turn each has its turn
            _describe(loss, site)
        graphs.watch(loss, "train")
    if S.let_go:
        S.let_go[0].settle()
    for loop in S.loops:
        loop.note_backward()
    _look_at_wrapped(since, loss, site)


def _value(loss: Any) -> Any:
    """A number, or on a device a tensor that is read later."""
    try:
        return float(_item[0](loss)) if loss.is_cpu and loss.numel() == 1 else loss.detach()
    except (RuntimeError, TypeError):
        return loss.detach()


def _look_at_gradients(site: sites.Site) -> None:
    zeroing.check()
    if S.steps < thrown.NUM_STEPS:
        thrown.look(site)
    if S.steps < 64 and any(marks.of(o).zeroed for o in marks.optimizers()) and all(_grads_none(o) for o in marks.optimizers()):
        _since_zero.clear()
    _since_zero[site] = _since_zero.get(site, 0) + 1


def num_since_zero() -> int:
    """Backwards whose gradients are added up now; 0 where nobody looks at that any more."""
    return sum(_since_zero.values()) if S.steps < 64 else 0


def _look_at_wrapped(since: Any, loss: Any, site: sites.Site) -> None:
    """no_sync() and eval mode at this backward, and whether it goes around a DDP object."""
    no_sync = in_eval = False
    bypassed: list[Any] = []
    for wrapped in S.ddps:
        model = wrapped.ref()
        if model is not None:
            no_sync = no_sync or not (wrapped.armed if wrapped.graded else model.require_backward_grad_sync)
            in_eval = in_eval or not model.training
            if not wrapped.forwards and model.training:
                bypassed.append(wrapped)
    since.last_no_sync = no_sync
    if bypassed and S.steps < 64 and loss.grad_fn is not None:
        _look_for_bypass(bypassed, loss, site)
    if in_eval or (not S.ddps and S.steps and manual.roots_in_eval()):
        since.eval_backward = True


def _grads_none(optimizer: Any) -> bool:
    return all(
        p.grad is None or not digests.any_sampled(p.grad)
        for g in optimizer.param_groups
        for p in g["params"][:4]
        if p.grad is None or digests.plain(p.grad)
    )


def _look_for_bypass(wrapped: list[Any], loss: Any, site: sites.Site) -> None:
    reached = manual.leaves(loss)
    for one in wrapped:
        hit = [one.names[i] for i in reached if i in one.names]
        if hit:
            where = ddp.last_module_access() or sources.loss_made_at(site[0], site[1]) or site
            S.recorder.event("bypass", where, index=one.index, num=len(hit), names=hit[:20])


def _leave(loss: Any, began: float, seq_before: int, python_before: int) -> None:
    since = S.since
    since.backward_s += time.perf_counter() - began
    issued = seq() - seq_before - (since.python_seq - python_before)
    if issued > 0 or _reducer_groups_moved():
        since.num_reduce += 1
        S.recorder.syncs += 1
    for look in at_left.due(S.steps) if S.backwards <= 256 else ():
        look(loss)
    for wrapped in S.ddps:
        wrapped.forwards = 0  # one forward arms the reducer for one backward
        wrapped.graded = wrapped.armed = False
    if loss.grad_fn is not None:
        manual.remember(loss)
    if S.steps < thrown.NUM_STEPS and S.loss_site is not None:
        thrown.note_backward(S.loss_site)
    for m in list(marks.table.values()):
        if (not S.light or m.on_device) and (optimizer := m.optimizer()) is not None:
            m.on_device = m.on_device if S.light else zeroing.on_device(optimizer)
            m.cleared = False
            zeroing.note_versions(optimizer, m)
            m.added = m.added or zeroing.has_added(m)
            if S.steps < GRADIENT_STEPS or comm_hooks.due():
                _local[id(optimizer)] = samplevalues.gradients(optimizer)
            if S.steps < UNGRADED_STEPS and S.ddps:
                m.graded.update(id(p) for g in optimizer.param_groups for p in g["params"] if p.grad is not None)


_group_seq: dict[int, int] = {}


def _reducer_groups_moved() -> bool:
    """DDP objects on a group of their own."""
    moved = False
    for wrapped in S.ddps:
        model = wrapped.ref()
        group = getattr(model, "process_group", None)
        if group is None or group is S.group:
            continue
        try:
            now = int(group._get_sequence_number_for_group())
        except (RuntimeError, AttributeError):
            continue
        moved = moved or now != _group_seq.get(id(group), now)
        _group_seq[id(group)] = now
    return moved


def note_unclipped() -> None:
    """Before a clip: what a hand-written sync made of the gradients, which the clip is about to scale."""
    if S.steps < GRADIENT_STEPS or comm_hooks.due():
        for optimizer in marks.optimizers():
            _unclipped[id(optimizer)] = samplevalues.gradients(optimizer)


def _at_light_step(optimizer: Any, witness: Any) -> None:
    m = marks.of(optimizer)
    S.since.zeroed = m.zeroed or not m.stepped or not (S.light or m.added)
    m.zeroed = m.added = m.cleared = False
    if not (m.stepped or S.light):
        m.on_device = zeroing.on_device(optimizer)
    m.stepped = True
    m.num_steps += 1
    zeroing.note_versions(optimizer, m)
    if _since_zero:
        _since_zero.clear()


def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    counted = list(_since_zero.items())[:8]
    _at_light_step(optimizer, witness)
    own = comm_hooks.own(optimizer) if comm_hooks.due() else {}
    if S.steps < GRADIENT_STEPS or own:
        local, at_step = _local.pop(id(optimizer), {}), samplevalues.gradients(optimizer)
        synced = _unclipped.pop(id(optimizer), at_step)
        contained(assigned.note_changed)(witness.opt, local, synced)
        S.recorder.event(
            "gradients",
            sites.here(3),
            opt=witness.opt,
            names={k: witness.by_position[int(k)] for k in local},
            local=local,
            **({"own": own} if own else {}),
            **({"hooked": hooked} if (hooked := hookedgrads.take(optimizer)) else {}),
            synced=synced,
            at_step=at_step,
            weights=samplevalues.weights(optimizer) if S.steps < GRADIENT_STEPS else {},
            backwards=S.since.num_backward,
        )
    if S.steps < 24 or _is_unusual(counted):
        _usual[0] = len(counted) and counted[0][1]
        S.recorder.event(
            "accumulation",
            S.loss_site,
            dropped=thrown.take(),
            opt=witness.opt,
            sites=[[sites.as_json(s), n] for s, n in counted],
            reduces=S.since.num_reduce,
            no_sync=S.since.last_no_sync,
            rows=S.batch_rows,
        )


_usual = [0, 16]  # backwards of the first statement in a step that was told; how many unusual ones are still told


def _is_unusual(counted: list[Any]) -> bool:
    unusual = bool(counted) and counted[0][1] != _usual[0] and _usual[1] > 0
    _usual[1] -= unusual
    return unusual


def _make(original: Any) -> Any:
    enter, leave = quiet(_enter), quiet(_leave)

    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if S.in_backward:
            return original(self, *args, **kwargs)
        loss = self[0] if isinstance(self, (list, tuple)) and self else self
        if not hasattr(loss, "grad_fn"):
            return original(self, *args, **kwargs)
        if S.dark:
            return dark.backward(original, self, args, kwargs)
        site = sites.here(2)
        enter(loss, site, args[0] if args else kwargs.get("gradient", kwargs.get("grad_tensors")))
        S.recorder.enter("backward", site)
        began, seq_before, python_before = time.perf_counter(), seq(), S.since.python_seq
        S.in_backward += 1
        try:
            result = original(self, *args, **kwargs)
        finally:
            S.in_backward -= 1
        S.recorder.leave()
        leave(loss, began, seq_before, python_before)
        return result

    return backward


def _grad(original: Any) -> Any:
    """torch.autograd.grad with respect to leaves is a backward that leaves no .grad: the update that follows is written by hand."""
    enter, leave = quiet(_enter), quiet(_leave)

    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = [inputs] if hasattr(inputs, "grad_fn") else list(inputs)
        loss = outputs[0] if isinstance(outputs, (list, tuple)) and outputs else outputs
        trains = (
            not kwargs.get("create_graph") and hasattr(loss, "grad_fn") and wanted and all(getattr(w, "is_leaf", False) for w in wanted)
        )
        if S.in_backward or not trains or S.recorder.disabled:
            return original(outputs, wanted if not hasattr(inputs, "grad_fn") else inputs, *args, **kwargs)
        site = sites.here(2)
        _note_grad(wanted, site)
        enter(loss, site)
        before_seq, before_python, began = seq(), S.since.python_seq, time.perf_counter()
        S.in_backward += 1
        try:
            result = original(outputs, wanted if not hasattr(inputs, "grad_fn") else inputs, *args, **kwargs)
        finally:
            S.in_backward -= 1
        leave(loss, began, before_seq, before_python)
        return result

    return grad


@quiet
def _note_grad(wanted: list[Any], site: sites.Site) -> None:
    hit = [p for p in wanted if ddp.wrap_of(p) >= 0]
    if hit:
        S.recorder.event("autograd_grad", site, num=len(hit), index=ddp.wrap_of(hit[0]))


def _after_optimizer(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    marks.of(self).num_modules = names.num_made[0]
    reached.look_soon()
    steps.made_at[self] = sites.here(4)


def arm() -> None:
    import torch

    _item[0] = torch.Tensor.item
    wrap(torch.Tensor, "backward", _make)
    wrap(torch.autograd, "backward", _make)
    wrap(torch.autograd, "grad", _grad)
    after(torch.optim.Optimizer, "__init__", _after_optimizer)
    after(torch.optim.Optimizer, "add_param_group", lambda *args, **kwargs: reached.look_soon())
    at_zero_grad.append(thrown.note_cleared, thrown.NUM_STEPS)
    after(torch.optim.Optimizer, "zero_grad", _after_zero_grad)
    steps.at_step.append(_at_step)
    steps.at_light_step.append(_at_light_step)
