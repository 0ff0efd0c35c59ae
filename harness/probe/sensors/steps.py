"""The witness: one row an optimizer step, from torch's own global step hooks.

Event "params" (once an optimizer, again when its parameters change): opt, kind, names, numels, shapes, dtypes, devices, ddp (index of the wrap event or -1),
owned (a living module has it), held_as (barenames), gathered (names, fullyshard), requires_grad, groups (lr, weight_decay a group), slices.
Event "train_flags" (whenever a step finds other modes than the last, 64 at most): opt, num_eval, eval (names of modules in eval mode, 20 at most;
"" is the model itself), tops (whether each model itself is in train mode).
Event "full": digests {name: crc} of every parameter and optimizer state tensor, at the end of the process (why="end").
"""

from __future__ import annotations

import math
import sys
import time
import weakref
from dataclasses import dataclass
from typing import Any

from .. import barenames, digests, lastloss, marks, names, protocol, sites, trainflags
from ..arm import at_close
from ..looks import Looks
from ..patching import contained, quiet
from ..state import MASK, S, mix, seq
from . import collectives, dark, ddp, edits, graphs, lonesteps, memory, queue, rng

_known: dict[int, Witness] = {}  # by id of the optimizer, which takes its entry with it
_counter = [0]
made_at: weakref.WeakKeyDictionary[Any, sites.Site] = weakref.WeakKeyDictionary()  # statement that constructed an optimizer
FULL_AT_END_BYTES = 256_000_000  # the final integer hash of everything; 0.6 s a GB and only once
FIRST_READS = 64


class Witness:
    """What is remembered about one optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.opt = _counter[0]
        _counter[0] += 1
        self.kind = type(optimizer).__name__
        self.optimizer = weakref.ref(optimizer)
        self.learn(optimizer)
        self.param_each: list[int] = []
        self.flags = 0  # digest of the modules' modes that was told last
        self.hyper: tuple[list[Any], int] = ([], 0)  # hyperparameters, and their digest
        self.began = False  # its first step was recorded
        self.none = 0  # digest of which gradients were not there at the last step

    def learn(self, optimizer: Any) -> None:
        known = names.Known(optimizer.param_groups)
        self.ids = [id(p) for p in known.params]
        self.places = known.order  # of each of `refs` in the optimizer's groups
        self.num_reads = 0
        self.by_position = known.names
        self.names = [known.names[i] for i in known.order]
        self.params = [known.params[i] for i in known.order]
        self.refs = [weakref.ref(p) for p in self.params]
        self.owned = [known.owned[i] for i in known.order]
        self.roots = known.roots
        self.modules = trainflags.Modules()
        self.rotation = digests.Rotation(self.params)
        self.on_device = any(p.device.type != "cpu" for p in self.params)
        self.wraps = [ddp.wrap_of(p) for p in self.params]
        self.of_ddp = protocol.FLAG_DDP if any(w >= 0 for w in self.wraps) else 0
        self.describe(optimizer)
        self.params = []  # weak references only: we keep nothing of the user's alive

    def describe(self, optimizer: Any) -> None:
        S.recorder.event(
            protocol.PARAMS,
            made_at.get(optimizer),
            opt=self.opt,
            kind=self.kind,
            names=self.names,
            numels=[p.numel() for p in self.params],
            shapes=[list(p.shape) for p in self.params],
            dtypes=[str(p.dtype).removeprefix("torch.") for p in self.params],
            devices=sorted({str(p.device) for p in self.params}),
            ddp=self.wraps,
            owned=self.owned,
            held_as=contained(barenames.told)(self.names, self.params, self.owned),
            gathered=names.gathered(self.params),
            sharded=any(type(p).__name__ == "DTensor" or type(getattr(p, "data", p)).__name__ == "DTensor" for p in self.params),
            shared=sum(p.is_shared() for p in self.params if p.device.type == "cpu"),
            requires_grad=[p.requires_grad for p in self.params],
            roots=[type(r()).__name__ for r in self.roots],
            groups=[{k: g.get(k) for k in ("lr", "weight_decay", "momentum") if isinstance(g.get(k), (int, float))} for g in optimizer.param_groups],
            slices=len(self.rotation.slices),
            param_bytes=self.rotation.num_bytes,
        )

    def current(self) -> list[Any]:
        return [ref() for ref in self.refs]

    def read(self, optimizer: Any) -> list[Any]:
        """The optimizer's parameters, by name. Whether they are those that were learnt is asked at the first steps and then at every 8th (35 us where
        there are 60), of the outermost two at each: others in their place are named late, and read at once."""
        groups = optimizer.param_groups
        held = groups[0]["params"] if len(groups) == 1 else [p for group in groups for p in group["params"]]
        self.num_reads += 1
        if len(held) != len(self.ids) or (self._is_asked(held) and self.ids != list(map(id, held))):
            self.learn(optimizer)
            self.num_reads = 1
        return [held[at] for at in self.places]

    def _is_asked(self, held: list[Any]) -> bool:
        """From the 256th step on few steps come here (protocol.witnessed)."""
        if self.num_reads < FIRST_READS or self.num_reads % 8 == 0 or S.steps >= 256:
            return True
        return bool(held) and (self.ids[0] != id(held[0]) or self.ids[-1] != id(held[-1]))


def witness_of(optimizer: Any) -> Witness:
    witness = _known.get(id(optimizer))
    if witness is None:
        witness = _known[id(optimizer)] = Witness(optimizer)
        weakref.finalize(optimizer, _known.pop, id(optimizer), None).atexit = False
    return witness


def weights() -> set[int]:
    """Where the parameters of every optimizer that has stepped lie."""
    return {at for w in list(_known.values()) for p in w.current() if p is not None and (at := digests.address(p))}


@dataclass
class Pending:
    """Between the pre and the post hook of one step."""

    witness: Witness
    params: list[Any]
    grad: int
    grads: list[int]
    none: int
    all_none: bool
    before: list[int]  # parameter digests before the step
    blind: bool  # device tensors stay unread at this step


_pending: dict[int, Pending] = {}


DEVICE_EVERY = 16  # digests of device tensors wait for the device: the first steps, then every 16th


def _is_blind(witness: Witness) -> bool:
    """Whether this step's tensors stay unread: a copy would wait for the device, or break the capture of a CUDA graph."""
    import torch as untyped

    torch: Any = untyped
    if not witness.on_device or not torch.cuda.is_initialized():
        return False
    return bool(torch.cuda.is_current_stream_capturing()) or (S.steps >= DEVICE_EVERY and S.steps % DEVICE_EVERY != 0)


def _closure(args: Any, kwargs: Any) -> Any:
    return (args[1] if len(args) > 1 else None) or (kwargs or {}).get("closure")  # args[0] is the optimizer itself


def under_way() -> bool:
    """Whether an optimizer is inside its step: the backwards that come now are its closure's."""
    return bool(_pending or dark.under_way)


def _inside_another() -> bool:
    """Whether another optimizer's step() is under way: ZeroRedundancyOptimizer and its like hand their step on to one that holds a part."""
    if not (_pending or dark.under_way):
        return False
    frame = sys._getframe(2)
    for _ in range(40):
        if frame is None:
            break
        if frame.f_code.co_name == "wrapper" and ((outer := id(frame.f_locals.get("self"))) in _pending or outer in dark.under_way):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False  # that step raised


def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if _inside_another():
        return
    for ends in at_any_step.due(S.steps):
        ends(optimizer)
    if S.dark and id(optimizer) in _known:
        dark.before_step(optimizer)
        return
    began = time.perf_counter()
    if S.group is None and not S.light:
        collectives.adopt()
    S.since.step_began = began
    if S.light and (known := _known.get(id(optimizer))) is not None:
        _before_light(optimizer, known, _closure(args, kwargs) is None)
        S.probe_s += time.perf_counter() - began
        return
    closure = _closure(args, kwargs)
    witness = witness_of(optimizer)
    params = witness.read(optimizer)
    tensors = [None if p is None else p.grad for p in params] if closure is None else []
    blind = S.light or _is_blind(witness)
    grad, grads = digests.of_tensors(tensors, lasting=False) if tensors and not blind else (0, [0] * len(params))
    absent = [t is None for t in tensors]
    none = digests.wide(bytes(absent)) if tensors and not blind else 0
    if none and none != witness.none:
        witness.none = none
        edits.num_edits[0] += 1  # something was frozen or unfrozen
    if not blind and (not witness.param_each or (S.since.num_coll and witness.wraps and (max(witness.wraps) < 0 or S.since.last_no_sync))):
        # before the first step, and where the script may have averaged parameters by hand since the last one
        witness.param_each = digests.of_tensors(params)[1]
        if S.steps < 256:
            S.recorder.event("before", opt=witness.opt, digest=protocol.digest_of(witness.param_each))
    dark.under_way.clear()
    _pending.clear()  # a step that raised leaves none of its parameters behind
    all_none = bool(tensors) and all(absent)
    _pending[id(optimizer)] = Pending(witness, params, grad, grads, none, all_none, witness.param_each, blind)
    if S.steps < UNGRADED_STEPS and tensors:
        _tell_ungraded(witness, params, tensors, marks.of(optimizer).graded)
    for look in at_step.due(S.steps):
        look(optimizer, witness, params)
    S.probe_s += time.perf_counter() - began


def _before_light(optimizer: Any, witness: Witness, has_gradients: bool) -> None:
    """At a step that carries no digests: nothing is read but what is in the row at every step."""
    dark.under_way.clear()
    _pending.clear()
    dark.under_way[id(optimizer)] = protocol.FLAG_ALL_NONE if has_gradients and not _any_gradient(optimizer) else 0
    for look in at_light_step:
        look(optimizer, witness)


def _any_gradient(optimizer: Any) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


UNGRADED_STEPS = 8


def _tell_ungraded(witness: Witness, params: list[Any], tensors: list[Any], graded: set[int]) -> None:
    """Event "no_gradient": wrapped parameters that require a gradient and have none although others of this optimizer have one; `taken`:
    those of them that had one after a backward, before the script took it away."""
    lacking = [
        (n, id(p) in graded)
        for n, w, p, g in zip(witness.names, witness.wraps, params, tensors, strict=True)
        if w >= 0 and g is None and p is not None and p.requires_grad
    ]
    graded.clear()
    if lacking and len(lacking) < len(tensors):
        names, taken = [n for n, _ in lacking], [n for n, had in lacking if had]
        S.recorder.event("no_gradient", opt=witness.opt, names=names[:400], taken=taken[:400])


at_step = Looks()  # sensors that look at the gradients just before a step with digests: (optimizer, witness, params)
at_light_step: list[Any] = []  # what is asked at the other steps that leave a row too: (optimizer, witness)
at_any_step = Looks()  # what ends at a step, of whatever kind: (optimizer)


def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if (light := dark.under_way.pop(id(optimizer), None)) is not None and S.dark:
        if not S.since.num_reduce and S.since.num_backward and _known[id(optimizer)].of_ddp:
            lonesteps.look(_known[id(optimizer)])
        dark.after_step(optimizer)
        return
    began = time.perf_counter()
    if light is not None:
        witness, flags = _known[id(optimizer)], light | protocol.FLAG_CHANGED
        S.steps_by_optimizer += 1
        write_row(witness.opt, flags | witness.of_ddp, began, lr=_lr(optimizer))
        return
    pending = _pending.pop(id(optimizer), None)
    if pending is None:
        return
    witness = pending.witness
    step = S.steps
    param, each = digests.of_tensors(pending.params) if not pending.blind else (0, pending.before)
    witness.param_each = each
    full = witness.rotation.digest(pending.params, step) if not pending.blind else 0
    flags = (protocol.FLAG_CHANGED if each != pending.before or pending.blind else 0) | (protocol.FLAG_ALL_NONE if pending.all_none else 0)
    flags |= witness.of_ddp
    # the first step is described by what came before it too: equal parameters at the start tell a replica from a stranger
    if not witness.began:
        witness.began = True
        S.recorder.event("initial", opt=witness.opt, each=pending.before[:4096])
    S.steps_by_optimizer += 1
    write_row(
        witness.opt, flags, began, grad=pending.grad, param=param, full=full, none=pending.none, hyper=0 if pending.blind else _hyper(optimizer, witness),
        train=0 if pending.blind else trainflags.look(witness), lr=_lr(optimizer),
    )  # fmt: skip
    if not pending.blind and protocol.detail_kept(step, len(each)):
        S.recorder.detail(step, witness.opt, pending.grads, each)


def write_row(
    opt: int,
    flags: int,
    began: float,
    *,
    grad: int = 0,
    param: int = 0,
    full: int = 0,
    none: int = 0,
    hyper: int = 0,
    train: int = 0,
    lr: float,
) -> None:
    """Close the step: pack what has been summed since the last one."""
    since, step = S.since, S.steps
    if not S.light or began - _machine[0] >= MACHINE_EVERY_S:
        _machine[:] = [began, queue.waited_s(), *memory.now(step)]
    _, waited, rss, alloc, reserved = _machine
    if protocol.kept(step):
        graphs.note_row(step)
        loss = lastloss.value()
        if loss is not None and not math.isfinite(loss):
            flags |= protocol.FLAG_LOSS_NOT_FINITE
        flags |= (
            (protocol.FLAG_ZEROED if since.zeroed else 0)
            | (protocol.FLAG_NO_SYNC if since.last_no_sync else 0)
            | (protocol.FLAG_EVAL if since.eval_backward else 0)
        )
        first = since.first_sync or since.step_began or began
        packed = protocol.ROW.pack(
            grad, param, full, none, train, hyper, since.index, since.batch, since.coll, ddp.buffer_digest(step), rng.digest(step),
            mix(since.draws, rng.python_digest(step)) if since.draws or step < 64 else 0,
            step & 0xFFFFFFFF, opt & 0xFFFF, flags, time.time_ns(), seq(), since.num_coll, since.num_reduce, since.num_backward, since.num_forward,
            since.num_batches, since.num_samples, S.graphs_alive, S.sched_steps, math.nan if loss is None else loss, lr, since.scale,
            since.grad_norm, began - since.start, since.data_s, since.coll_s, since.backward_s, max(0.0, first - since.start),
            max(0.0, began - since.step_began) if since.step_began else 0.0, S.probe_s - _last_probe[0], waited - since.queue, since.self_queue,
            rss, alloc, reserved,
        )  # fmt: skip
        S.recorder.row(packed, step)
    inside[0] = S.in_backward > 0
    dark.close()
    if step == 0:
        S.recorder.phase("train")
    _last_probe[0] = S.probe_s
    S.since.queue = waited
    S.probe_s += time.perf_counter() - began


MACHINE_EVERY_S = 0.004  # how often memory and run queue are read at light steps: 5 us, more on a device; PRF102 looks for 5 ms a step
_machine: list[Any] = [0.0, 0.0, 0, 0, 0]  # when they were read, run queue seconds, bytes: resident, CUDA allocated, CUDA reserved
_last_probe = [0.0]
inside = [False]  # the last step came inside a backward, from a hook


_HYPER = ("lr", "weight_decay", "momentum", "betas", "eps", "alpha", "dampening", "nesterov")


def _hyper(optimizer: Any, witness: Witness) -> int:
    """A digest of the hyperparameters; worked out where they are others than at the last step: 25 us."""
    found = [_plain(group[key]) for group in optimizer.param_groups for key in _HYPER if key in group]
    values = [tuple(value) if type(value) is list else value for value in found]  # `betas` of a configuration, which may be written to in place
    if values != witness.hyper[0]:
        digest = 1
        for value in values:
            digest = mix(digest, _crc(repr(value)))
        witness.hyper = values, digest & MASK
    return witness.hyper[1]


def _plain(value: Any) -> Any:
    return (
        float(value)
        if hasattr(value, "item") and getattr(getattr(value, "device", None), "type", "cpu") == "cpu"
        else (value if not hasattr(value, "item") else "device")
    )


def _crc(text: str) -> int:
    return digests.wide(text.encode())


def _lr(optimizer: Any) -> float:
    try:
        lr = optimizer.param_groups[0].get("lr", math.nan)
        return lr if type(lr) is float else float(_plain(lr))
    except (TypeError, ValueError, IndexError):
        return math.nan


def finish() -> None:
    """Integer hash of everything that was trained, once, at the end."""
    for witness in list(_known.values()):
        params, optimizer = witness.current(), witness.optimizer()
        if optimizer is None or witness.rotation.num_bytes > FULL_AT_END_BYTES or any(p is None or p.device.type != "cpu" for p in params):
            continue
        state: dict[str, int] = {}
        for name, p in zip(witness.names, params, strict=True):
            for key, value in optimizer.state.get(p, {}).items():
                if digests.plain(value) and value.device.type == "cpu":
                    state[f"{name}:{key}"] = digests.full(value)
        S.recorder.event(
            "full", why="end", opt=witness.opt, params={n: digests.full(p) for n, p in zip(witness.names, params, strict=True)}, state=state
        )


def arm() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(quiet(before_step, loses_step=True))
    register_optimizer_step_post_hook(quiet(after_step, loses_step=True))
    at_close.append(quiet(finish))
