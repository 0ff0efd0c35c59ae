"""Memory that `to_empty()` gave to buffers and parameters, and that nobody had filled when the first forward read it.

Each tensor is remembered as it lay there: by weak reference, its version and a digest of a few of its elements. One that is another object, of another
version or of other content at the end of the first forward has been filled, by that forward at the latest. Of the others it is noted which the forward
reads for their values. Looked at are the first forwards after to_empty() until one has read some of them; not under torch.compile.
Event "never_filled": site (of to_empty()), names [[name, a buffer, in the state dict, all zeros]] (first 60), num, read (site of the first
reading line), data_writes (the source writes through `.data`, which leaves no version behind).
"""

from __future__ import annotations

import functools
import linecache
import re
import sys
import weakref
from typing import Any

from .. import cuts, digests, modulehooks, names, sites, valuereads
from ..patching import after, before, quiet
from ..state import S

DATA_WRITE = re.compile(r"\.data(\.\w+_\(|\[|\s*=[^=])")
MAX_TENSORS, MAX_TOLD, MAX_FORWARDS = 20_000, 60, 8


class Empty:
    """One tensor right after to_empty()."""

    __slots__ = ("digest", "is_buffer", "is_kept", "module", "read", "ref", "site", "slot", "version", "zeros")

    def __init__(self, module: Any, slot: str, tensor: Any, is_buffer: bool, site: sites.Site) -> None:
        self.ref, self.module = weakref.ref(tensor), weakref.ref(module)
        self.slot, self.is_buffer, self.site = slot, is_buffer, site
        self.is_kept = not is_buffer or slot not in getattr(module, "_non_persistent_buffers_set", ())
        self.version, self.digest, self.zeros = tensor._version, 0, False
        self.read: sites.Site | None = None

    def still_empty(self) -> Any:
        """The tensor, where nobody has given its name to another one or counted a write to it; None otherwise."""
        tensor = self.ref()
        return tensor if tensor is not None and tensor._version == self.version else None

    def still_there(self) -> bool:
        module = self.module()
        held = vars(module)["_buffers" if self.is_buffer else "_parameters"] if module is not None else {}
        return held.get(self.slot) is self.ref()


_empty: dict[tuple[int, str], Empty] = {}  # (id of the module, name in it)
_modules: set[int] = set()
_hooks: list[Any] = []
_replaced: list[tuple[Any, str, Any, Any]] = []  # (class, name, what stood there, what stands there for now)
_forward: list[Any] = [None, 0]  # id of the outermost module under way, how many have been seen


def _after_to_empty(result: Any, module: Any, *args: Any, recurse: bool = True, **kwargs: Any) -> None:
    site = sites.here(4)
    if S.compiling or S.steps or not site[0]:
        return
    new: dict[tuple[int, str], Empty] = {}
    for one in [*module.modules()] if recurse else [module]:
        _modules.add(id(one))
        for kind in ("_parameters", "_buffers"):
            for slot, tensor in vars(one)[kind].items():
                if tensor is not None and not tensor.is_inference() and len(_empty) + len(new) < MAX_TENSORS:
                    new[id(one), slot] = Empty(one, slot, tensor, kind == "_buffers", site)
    _digest(list(new.values()))
    _empty.update({key: one for key, one in new.items() if one.digest})
    if _empty and not _hooks:
        _watch()


def _digest(new: list[Empty]) -> None:
    """One copy for all that lie on a device; 0 of those without elements, and of kinds that are not understood."""
    parts = [_part(one.ref()) for one in new]
    for one, part, digest in zip(new, parts, digests.of_tensors(parts)[1], strict=True):
        one.digest = digest
        one.zeros = bool(digest) and not digests.any_sampled(part)


def _part(tensor: Any) -> Any:
    """This rank's part of it, as real numbers: rotary frequencies are complex in many models."""
    import torch

    part = digests.local(tensor) if tensor is not None else None
    return torch.view_as_real(part) if part is not None and part.is_complex() and not part.is_conj() else part


def _watch() -> None:
    import torch

    begins, ends = quiet(_begins), quiet(_ends)
    _forward[:] = [None, 0]

    def pre_hook(module: Any, args: Any) -> None:
        if _forward[0] is None and id(module) in _modules:
            begins(module)

    def hook(module: Any, args: Any, output: Any) -> None:
        if _forward[0] == id(module):
            ends(module)

    registry = torch.nn.modules.module
    _hooks.append(registry.register_module_forward_pre_hook(pre_hook))
    _hooks.append(registry.register_module_forward_hook(hook, always_call=True))
    for name in ("__init__", "_sync_buffers"):
        _replace(torch.nn.parallel.DistributedDataParallel, name, _syncing)


def _begins(module: Any) -> None:
    """Only what is still empty is looked for: mostly there is none, and this is the end of it."""
    _forward[1] += 1
    _drop_filled(placed=_forward[1] == 1)  # later on FSDP has put gathered parameters into their places
    if not _empty or S.steps or S.compiling or _forward[1] > MAX_FORWARDS:
        stop()
        return
    _forward[0] = id(module)
    _look_at_reads()


def _drop_filled(placed: bool) -> None:
    entries = list(_empty.items())
    tensors = [one.still_empty() for _, one in entries]
    each = digests.of_tensors([_part(t) for t in tensors])[1]
    for (key, one), tensor, digest in zip(entries, tensors, each, strict=True):
        if tensor is None or digest != one.digest or ((placed or one.is_buffer) and not one.still_there()):
            del _empty[key]


def _replace(owner: Any, name: str, make: Any) -> None:
    original = vars(owner).get(name)
    if original is not None:
        mine = make(original)
        setattr(owner, name, mine)
        _replaced.append((owner, name, original, mine))


def _restore(name: str = "") -> None:
    """All of them or those of a name, unless somebody has put another one on top."""
    for entry in [e for e in _replaced if name in ("", e[1])]:
        _replaced.remove(entry)
        owner, own_name, original, mine = entry
        if vars(owner).get(own_name) is mine:
            setattr(owner, own_name, original)


def _syncing(original: Any) -> Any:
    """DDP writes what rank 0 has into all ranks' buffers and parameters: there it is the memory's old content, counted as a write."""
    drop, rebase = quiet(_drop_filled), quiet(_rebase)

    @functools.wraps(original)
    def sync(*args: Any, **kwargs: Any) -> Any:
        drop(placed=False)
        result = original(*args, **kwargs)
        rebase()
        return result

    return sync


def _rebase() -> None:
    for one in _empty.values():
        tensor = one.ref()
        one.version = tensor._version if tensor is not None else one.version


def _look_at_reads() -> None:
    """torch.nn.Module.__getattr__ is where parameters and buffers are read by name; replaced for one forward."""
    import torch

    _replace(torch.nn.Module, "__getattr__", _reading)


def _reading(original: Any) -> Any:
    look = quiet(_note_read)

    def __getattr__(self: Any, name: str) -> Any:
        if (id(self), name) in _empty:
            look((id(self), name), sys._getframe(1))
        return original(self, name)

    return __getattr__


def _note_read(key: tuple[int, str], frame: Any) -> None:
    one = _empty[key]
    if one.read is None and valuereads.is_value(frame):
        user = sites.user_frame(frame)
        one.read = sites.of_frame(user) if user is not None else sites.UNKNOWN


def _ends(module: Any) -> None:
    _forward[0] = None
    _restore("__getattr__")
    _drop_filled(placed=False)
    read = [one for one in _empty.values() if one.read is not None and (one.is_buffer or not one.zeros)]
    if read:
        stop()
        _tell(read, module)
        _empty.clear()


def _tell(read: list[Empty], root: Any) -> None:
    prefixes = {id(module): f"{prefix}." if prefix else "" for prefix, module in root.named_modules()}
    told = [[names.clean(prefixes.get(id(one.module()), "") + one.slot), one.is_buffer, one.is_kept, one.zeros] for one in read[:MAX_TOLD]]
    at = next((one.read for one in read if one.read and one.read[0]), None)
    S.recorder.event(
        "never_filled", read[0].site, names=told, num=len(read), read=sites.as_json(at) if at else None,
        data_writes=_writes_data(),
    )  # fmt: skip


def _writes_data() -> bool:
    """In doubt yes."""
    files = cuts.user_files()
    return len(files) > cuts.MAX_FILES or any(DATA_WRITE.search(line) for name in files for line in linecache.getlines(name))


def stop(*args: Any, **kwargs: Any) -> None:
    """For good; of a later to_empty() too, if it comes after the first step."""
    modulehooks.remove(_hooks)
    _restore()
    _forward[0] = None


def arm() -> None:
    import torch

    after(torch.nn.Module, "to_empty", _after_to_empty)
    before(torch, "compile", stop)
    before(torch.nn.Module, "compile", stop)
