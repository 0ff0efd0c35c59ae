"""Python-level collectives: what, how large, where from, in which order, how long.

Event "coll" (first 3000): op, numel, dtype, n (how many before it), reduce (name of the reduction), grad (the tensor is a gradient), world
(the default group), group_size (of another one), graded (of what may carry gradients: the backwards before it since the last step), each (sizes, of a batch
of messages), aliased (all results go into one tensor), hook (inside a communication hook of DDP), names (of the tensor in the calling code, and
the short strings among its variables as name='value': a loop over a dict of metrics calls every tensor alike), root (source or destination of a rooted
one), inside (called by autograd: from a hook, or an autograd.Function's backward), graphed (the tensor has a graph, a loss before its backward;
at the first call of a statement its stack [site...]), zero (what is reduced is zero, by samples),
sent (of a reduction between a backward and its step, on the CPU: a digest of samples of what this rank puts in),
replicated (the digest of a parameter that DDP keeps equal, before it is sent), buffer (the name of a wrapped model's own one), beside (it is
a trained parameter that no DDP object covers).
Event "coll_site" (once a call site): ways, loop: what decides whether, and how often, it is reached (see conditions.py); apart: each turn of the
loop sends what it has made by itself (see turns.py); yields: it stands in a generator; callers: the lines that led to it; divided: the one statement
behind it that divides what was sent by something (see predivided.py).
Event "one_entry" (once a call site): site, op, used: the source uses one entry alone of what is gathered there (see entries.py).
"""

from __future__ import annotations

import sys
import time
import weakref
from typing import Any
from zlib import crc32

from .. import conditions, digests, entries, failures, flatshards, generators, predivided, protocol, replicated, sites, turns, variables
from ..patching import quiet, wrap
from ..state import S, mix, seq
from . import gathers, handles, payloads, queue

OPS = (
    "all_reduce", "broadcast", "reduce", "all_gather", "gather", "gather_single", "scatter", "reduce_scatter",
    *protocol.GATHER_INTO, *protocol.REDUCE_SCATTER_INTO,
    "all_to_all", "all_to_all_single", "barrier", "monitored_barrier", "all_gather_object", "gather_object", "broadcast_object_list",
    "scatter_object_list", "all_reduce_coalesced", "send", "recv", "isend", "irecv", "batch_isend_irecv",
)  # fmt: skip


ROOT = {
    "broadcast": ("src", 1), "reduce": ("dst", 1), "gather": ("dst", 2), "gather_single": ("dst", 2), "scatter": ("src", 2),
    "broadcast_object_list": ("src", 1), "gather_object": ("dst", 2), "scatter_object_list": ("src", 2),
}  # fmt: skip
REDUCTIONS = ("all_reduce", "reduce", *protocol.REDUCE_SCATTER_INTO)
GRADED = protocol.POINT_TO_POINT | {"all_reduce", "reduce", "broadcast", "all_gather", *protocol.GATHER_INTO}
SHARDING = {*protocol.GATHER_INTO, *protocol.REDUCE_SCATTER_INTO}  # by these names torch's own sharding moves what it shards
FILLED = {"all_gather": ("tensor_list", 0), "gather": ("gather_list", 1), "all_to_all": ("output_tensor_list", 0)}


def _describe(op: str, args: Any, kwargs: Any, site: sites.Site) -> None:
    tensor = next((a for a in (*args, *kwargs.values()) if hasattr(a, "numel") and hasattr(a, "dtype")), None)
    numel = int(tensor.numel()) if tensor is not None else -1
    dtype = str(tensor.dtype).removeprefix("torch.") if tensor is not None else ""
    reduction = next(
        (str(a).rsplit(".", 1)[-1] for a in (*args, *kwargs.values()) if type(a).__name__ in ("RedOpType", "ReduceOp", "OpType")), ""
    )
    since = S.since
    since.num_coll += 1
    graphed = getattr(tensor, "grad_fn", None) is not None
    since.joined = since.joined or graphed
    since.coll = mix(since.coll, digests.wide(f"{op}|{numel}|{dtype}|{sites.digest(site)}".encode()))
    if not since.first_sync:
        queue.at_sync(since)
    S.recorder.event(
        "coll",
        site,
        op=op,
        numel=numel,
        dtype=dtype,
        n=S.collectives,
        reduce=reduction,
        grad=is_gradient(tensor),
        names=_names_of(tensor),
        **({"aliased": True} if op in FILLED and _is_one_tensor(op, args, kwargs) else {}),
        **_group_of(args, kwargs),
        **({"hook": True} if S.in_hook else {}),
        **({"graded": since.num_backward} if since.num_backward and op in GRADED else {}),
        **(_sizes(args, kwargs) if op == "batch_isend_irecv" else {}),
        **({"root": root} if op in ROOT and (root := _root(op, args, kwargs)) is not None else {}),
        **({"inside": True} if S.in_backward else {}),
        **({"graphed": _stack_of(site)} if graphed else {}),
        **(_content(tensor, since.num_backward) if op in REDUCTIONS else {}),
        **(_held(tensor) if op in ("broadcast", "all_reduce") and _is_called_by_user() else {}),
    )
    if site not in _told and len(_told) < MAX_SITES and not S.in_hook:
        _told.add(site)
        stack = sites.stack(2, conditions.MAX_FRAMES)
        more: dict[str, Any] = {**({"apart": True} if turns.apart(stack, op) else {}), **({"yields": True} if generators.holds(site) else {})}
        if since.num_backward and op in REDUCTIONS and (divided := predivided.behind(site, op)) is not None:
            more["divided"] = sites.as_json(divided)
        S.recorder.event("coll_site", site, op=op, **conditions.before(stack), callers=[sites.as_json(s) for s in stack[1:4]], **more)
    if op in entries.PLACE and site not in _asked and len(_asked) < 200:
        _asked.add(site)
        if (used := entries.only_one(op, site[0], site[1])) is not None:
            S.recorder.event("one_entry", site, op=op, used=sites.as_json(used))
    S.collectives += 1
    if op not in protocol.POINT_TO_POINT:
        S.recorder.syncs += 1
    for loop in S.loops:
        loop.collectives += 1


def _content(tensor: Any, graded: int) -> dict[str, Any]:
    """Of a plain tensor on the CPU; about 4 us."""
    if tensor is None or not tensor.is_cpu or not tensor.is_floating_point() or not digests.plain(tensor):
        return {}
    found = digests.bits(tensor)
    if not (digests.any_sampled(tensor) if found is None else digests.any_of(found, tensor.dtype)):
        return {"zero": True}
    return {"sent": crc32(found)} if found and graded else {}


def _caller() -> str:
    """The name of the module that made the call."""
    return str(frame.f_globals.get("__name__", "")) if (frame := sites.beyond_ours(sys._getframe(1))) is not None else ""


def _is_called_by_user() -> bool:
    """Not by torch for it: ZeroRedundancyOptimizer broadcasts what each rank has stepped."""
    return (frame := sites.beyond_ours(sys._getframe(1))) is not None and sites.is_user_code(frame.f_code)


def _held(tensor: Any) -> dict[str, Any]:
    """What DDP holds of this tensor's memory."""
    if held := replicated.digest(tensor):
        return {"replicated": held}
    if replicated.beside(tensor):
        return {"beside": True}
    return {"buffer": name} if (name := replicated.buffer(tensor)) else {}


def _stack_of(site: sites.Site) -> Any:
    """The frames of a statement's first call: a helper that averages a tensor says nothing of what it was given."""
    if site in _stacked or len(_stacked) >= MAX_SITES:
        return True
    _stacked.add(site)
    return [sites.as_json(s) for s in sites.stack(3, conditions.MAX_FRAMES)]


_stacked: set[sites.Site] = set()
_asked: set[sites.Site] = set()
_told: set[sites.Site] = set()
MAX_SITES = 64


def _root(op: str, args: Any, kwargs: Any) -> int | None:
    """The rank that a rooted collective was called with; that of the default group, as collectives of others are compared by nobody."""
    name, place = ROOT[op]
    given = kwargs.get(name, args[place] if len(args) > place else None)
    given = kwargs.get(f"group_{name}") if given is None else given
    return given if isinstance(given, int) else None


def _sizes(args: Any, kwargs: Any) -> dict[str, Any]:
    """Of a batch of messages."""
    if S.collectives >= MAX_NAMED:
        return {}
    batch = kwargs.get("p2p_op_list", args[0] if args else ())
    return {"each": [int(one.tensor.numel()) for one in batch[:64] if getattr(one, "tensor", None) is not None]}


def _is_one_tensor(op: str, args: Any, kwargs: Any) -> bool:
    """Whether the list to be filled holds one tensor several times: `[torch.empty(1)] * world_size`."""
    name, place = FILLED[op]
    filled = kwargs.get(name, args[place] if len(args) > place else None)
    if (
        not isinstance(filled, (list, tuple))
        or len(filled) < 2
        or not all(hasattr(t, "data_ptr") and t.device.type != "meta" for t in filled)
    ):
        return False
    addresses = [at for t in filled if (at := digests.address(t))]
    return len(set(addresses)) < len(addresses)


def _group_of(args: Any, kwargs: Any) -> dict[str, Any]:
    """Whether the call is on the default group: collectives of subgroups are compared by nobody. The size of a smaller one."""
    group = kwargs.get("group") or next((a for a in args if type(a).__name__ == "ProcessGroup"), None)
    if group is None or group is S.group:
        return {"world": True}
    return {"world": False, "group_size": group.size() if hasattr(group, "size") else None}


def is_gradient(tensor: Any) -> bool:
    """Whether the tensor is a parameter's gradient. The gradients' addresses are read once a step; one that is met is looked at again, for
    the gradient may be gone by now and its memory be another tensor's."""
    if tensor is None or tensor.device.type == "meta":
        return False
    from .. import marks

    key = (S.steps, S.backwards)
    if _read_at[0] != key:
        _read_at[0] = key
        _addresses.clear()
        for p in (p for o in marks.optimizers() for g in o.param_groups for p in g["params"] if p.grad is not None):
            _addresses[digests.address(p.grad)] = weakref.ref(p)
    at = digests.address(tensor)
    known = _addresses.get(at) if at else None
    return known is not None and (p := known()) is not None and p.grad is not None and digests.address(p.grad) == at


_read_at: list[Any] = [None]
_addresses: dict[int, weakref.ref[Any]] = {}
MAX_NAMED = 400  # calls whose tensor is looked up among the caller's variables


def _names_of(tensor: Any) -> list[str]:
    """What the calling code calls this tensor: local variables, entries of local dicts and lists. Equal sites may reduce other tensors."""
    if tensor is None or S.collectives >= MAX_NAMED:
        return []
    frame = sites.user_frame(sys._getframe(4))
    if frame is None:
        return []
    found: list[str] = []
    names = frame.f_locals
    for name, value in list(names.items())[:100]:
        if type(value) is str and len(value) <= 40:
            found.append(f"{name}={value!r}")
        elif value is tensor:
            found.append(name)
        elif type(value) is dict:
            found.extend(f"{name}[{key}]" for key, entry in list(value.items())[:50] if entry is tensor)
    variables.let_go(frame, names)
    return sorted(found)[:10]


def _make(op: str) -> Any:
    describe = quiet(_describe)

    def make(original: Any) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            if S.in_collective or S.recorder.disabled or (op in SHARDING and _caller().startswith("torch.")):
                return original(*args, **kwargs)
            site = sites.here(2)
            describe(op, args, kwargs, site)
            if op in flatshards.SETTLES:
                flatshards.settle(op, (*args, *kwargs.values()))
            S.recorder.enter(op, site)
            before, began = seq(), time.perf_counter()
            S.in_collective += 1
            try:
                result = original(*args, **kwargs)
            finally:
                S.in_collective -= 1
            S.recorder.leave()
            took_s = time.perf_counter() - began
            S.since.coll_s += took_s
            if op in payloads.OPS:
                payloads.note(op, site, took_s)
            S.since.python_seq += max(0, seq() - before)
            if S.steps < gathers.FIRST_STEPS and op in gathers.OPS:
                gathers.note(op, args, kwargs, result, site)
            if result is None and S.steps < flatshards.NUM_STEPS and op in flatshards.CALLS:
                flatshards.note(op, args, kwargs, site)
            if result is not None and S.steps < handles.NUM_STEPS and op in handles.OPS:
                handles.note(op, args, kwargs, result, site)
            return result

        return collective

    return make


called = [False]  # init_process_group, by this process


def _init(original: Any) -> Any:
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        site = sites.here(2)
        asked = {k: v for k, v in kwargs.items() if k in ("rank", "world_size", "backend", "init_method") and isinstance(v, (int, str))}
        if args and isinstance(args[0], str):
            asked.setdefault("backend", args[0])
        if len(args) > 1 and isinstance(args[1], str):
            asked.setdefault("init_method", args[1])
        called[0] = True
        S.recorder.event("pg", site, done=False, asked=asked)
        S.recorder.phase("init")
        S.recorder.enter("init", site)
        S.in_collective += 1
        try:
            result = original(*args, **kwargs)
        finally:
            S.in_collective -= 1
        S.recorder.leave()
        _joined(site, asked)
        return result

    return init_process_group


def adopt() -> None:
    """A default group that was not made through `dist.init_process_group` by that name: device meshes make one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        called[0] = True
        S.recorder.event("pg", done=False, asked={})
        _joined(sites.UNKNOWN, {})


@quiet
def _joined(site: sites.Site, asked: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    S.group = dist.distributed_c10d._get_default_group()
    S.recorder.phase("setup")
    S.recorder.event(
        "pg", site, done=True, asked=asked, rank=dist.get_rank(), world_size=dist.get_world_size(), backend=str(dist.get_backend()),
        torch=str(torch.__version__),
    )  # fmt: skip
    from . import beat

    beat.start()


def _destroy(original: Any) -> Any:
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        failures.record_in_flight()
        S.recorder.event("pg_destroy", sites.here(2))
        S.recorder.enter("destroy", sites.here(2))
        group = args[0] if args else kwargs.get("group")
        if group is None or group is S.group:
            S.group = (
                None  # before the call: the last reference waits for what is still under way, and that wait has to be seen as this call's
            )
        result = original(*args, **kwargs)
        S.recorder.leave()
        return result

    return destroy_process_group


def arm() -> None:
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    for name, make in (*((op, _make(op)) for op in OPS), ("init_process_group", _init), ("destroy_process_group", _destroy)):
        if wrap(c10d, name, make) and hasattr(dist, name):
            setattr(dist, name, getattr(c10d, name))
