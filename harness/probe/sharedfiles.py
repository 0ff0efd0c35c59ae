"""Open files that processes hold since before they were forked: they share one position in each, which the seek of one moves under the read of another.

Noted before the fork: what a data set, or a process's arguments, keep open, by weak reference, so that a file that is opened again in the child is
another. In the child its first fetches, or its first calls, are looked at with a profile function: whether it seeks and reads on such a file, whether
the position moved, and whether it takes a lock. Reads by position (os.pread, mmap) move nothing and are healthy.
"""

from __future__ import annotations

import dis
import fcntl
import io
import linecache
import os
import re
import stat
import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from types import FunctionType, GetSetDescriptorType
from typing import Any, NamedTuple

from . import copiedrng, origins, sites
from .patching import contained

FILES = (io.FileIO, io.BufferedReader, io.BufferedRandom, io.TextIOWrapper)
MAX_WORKERS, MAX_FILES = 16, 8
BYTES = MAX_WORKERS * MAX_FILES
MAX_OBJECTS, MAX_DEPTH, MAX_NAMES, MAX_ENTRIES = 48, 4, 60, 8
MAX_EVENTS = 50_000  # calls and returns of a fetch, 0.3 us each
SEEK, READ, LOCK, MOVED = 1, 2, 4, 8
READS = frozenset({"read", "read1", "readinto", "readinto1", "readline", "readlines", "readall", "peek"})
INNER_READS = frozenset({"fromfile", "load", "next"})  # these are given the file
UNLOCKS = frozenset({"rmdir", "unlink", "remove"})  # a lock that is a file or a directory: who makes it has it
Chain = tuple[tuple[type, str], ...]  # from the data set to the file: each holder's class, and its attribute


class Held(NamedTuple):
    """A file as it was before the fork."""

    refs: tuple[weakref.ref[Any], ...]  # the object and those inside it; none of a bare descriptor
    fd: int
    node: tuple[int, int]
    chain: Chain

    @property
    def name(self) -> str:
        """As the script would write it; "" where nothing holds it."""
        return ".".join(attribute for _, attribute in self.chain)

    @property
    def made(self) -> sites.Site | None:
        """The line that opens it, as far as a class of the user's holds it."""
        for look in (_filled_at, origins.attribute_line):
            found = next((s for kind, name in reversed(self.chain) if (s := look(kind, name)) is not None), None)
            if found is not None:
                return found
        return None

    @property
    def still_open(self) -> bool:
        try:
            told = os.fstat(self.fd)
        except OSError:
            return False
        return (told.st_dev, told.st_ino) == self.node

    @property
    def position(self) -> int:
        return os.lseek(self.fd, 0, os.SEEK_CUR)


def _filled_at(kind: type, attribute: str) -> sites.Site | None:
    """The first line of the user's class that calls something for `self.<attribute>`; a constructor may only set it to None."""
    codes = [f.__code__ for base in kind.__mro__ for f in vars(base).values() if isinstance(f, FunctionType) and sites.is_user_code(f.__code__)]
    for code in codes:
        for line in sorted({at for _, _, at in code.co_lines() if at}):
            if re.search(rf"\bself\.{re.escape(attribute)}\b(\s*:[^=]+)?\s*(,[^=]*)?=[^=].*\(", linecache.getline(code.co_filename, line)):
                return (code.co_filename, line, code.co_name)
    return None


def of(thing: Any) -> list[Held]:
    """The readable regular files that an object holds open, itself or through what it holds."""
    found: list[Held] = []
    for value, chain in _values(thing):
        one = held(value, chain)
        if one is not None and one.fd not in {h.fd for h in found}:
            found.append(one)
            if len(found) == MAX_FILES:
                break
    return found


def direct(thing: Any) -> list[Held]:
    """Those that it holds itself."""
    own = vars(thing) if isinstance(getattr(type(thing), "__dict__", {}).get("__dict__"), GetSetDescriptorType) else {}
    entries = [(part, name) for name, value in list(own.items())[:MAX_NAMES] for part in _parts(value)]
    return [one for part, name in entries if (one := held(part, ((type(thing), name),))) is not None]


def _values(thing: Any) -> Iterator[tuple[Any, Chain]]:
    todo: list[tuple[Any, Chain]] = [(thing, ())]
    seen = {id(thing)}
    while todo and len(seen) <= MAX_OBJECTS:
        holder, chain = todo.pop(0)
        for name, value in list(vars(holder).items())[:MAX_NAMES] if hasattr(holder, "__dict__") else ():
            longer = (*chain, (type(holder), name))
            for part in _parts(value):
                yield part, longer
                if len(longer) < MAX_DEPTH and copiedrng.may_hold(part) and id(part) not in seen:
                    seen.add(id(part))
                    todo.append((part, longer))


def _parts(value: Any, depth: int = 2) -> list[Any]:
    """What it holds where it is a list, a tuple or a dict, or one of these in another; itself otherwise."""
    if not depth or type(value) not in (dict, list, tuple):
        return [value]
    inner = list(islice(value.values() if type(value) is dict else value, MAX_ENTRIES))
    return [part for each in inner for part in _parts(each, depth - 1)]


def held(value: Any, chain: Chain) -> Held | None:
    """A readable regular file, or a number that is the descriptor of one."""
    if isinstance(value, FILES):
        try:
            objects = [value, *(inner for name in ("buffer", "raw") if (inner := getattr(value, name, None)) is not None)]
            return _regular(tuple(weakref.ref(o) for o in objects), value.fileno(), chain)
        except (OSError, ValueError):  # closed, detached, or no file of the system's
            return None
    if type(value) is int and value > 2 and chain and _is_descriptor(*chain[-1]):
        return _regular((), value, chain)
    return None


def _regular(refs: tuple[weakref.ref[Any], ...], fd: int, chain: Chain) -> Held | None:
    try:
        told = os.fstat(fd)
        readable = stat.S_ISREG(told.st_mode) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
    except OSError:
        return None
    return Held(refs, fd, (told.st_dev, told.st_ino), chain) if readable else None


def _is_descriptor(kind: type, name: str) -> bool:
    """A number by that name which nothing but the constructor sets: one that is set again may be a new descriptor of the same number."""
    if not any(word in name.lower() for word in ("fd", "descriptor", "handle", "fileno")):
        return False
    methods = [f for base in kind.__mro__ for n, f in vars(base).items() if isinstance(f, FunctionType) and n != "__init__"]
    return bool(methods) and not any(i.opname == "STORE_ATTR" and i.argval == name for f in methods for i in dis.get_instructions(f))


def watch(files: list[Held], tell: Callable[[int, int], None], calls: int = MAX_EVENTS) -> Callable[[], None]:
    """Looks at the calls of this thread until what it returns is called; tell(position in `files`, flags) then, of each file that was used."""
    look = _Look(files, calls)
    if sys.getprofile() is None:
        sys.setprofile(look)

    def end() -> None:
        if sys.getprofile() is look:
            sys.setprofile(None)
        for at, one in enumerate(files):
            if look.flags[at] & SEEK and one.still_open:
                look.note_position(at)
                tell(at, look.flags[at] | look.of_all)

    return contained(end)


class _Look:
    """A profile function: which C functions are called on the files."""

    def __init__(self, files: list[Held], calls: int) -> None:
        self.by_id = {id(o): (at, f) for at, f in enumerate(files) for ref in f.refs if (o := ref()) is not None}
        self.bare = [at for at, f in enumerate(files) if not f.refs]
        self.files = files
        self.flags = [0] * len(files)
        self.last = [f.position if f.still_open else -1 for f in files]
        self.of_all = 0
        self.left = calls

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        self.left -= 1
        if self.left < 0:
            sys.setprofile(None)
        elif event == "call" and frame.f_code.co_name == "_callmethod":
            self.of_all |= LOCK  # a manager's, which its own process keeps
        elif event == "c_call":
            try:
                self.note(arg.__name__, arg.__self__)
            except (AttributeError, OSError, ValueError):
                return

    def note(self, name: str, owner: Any) -> None:
        if isinstance(owner, FILES):
            at, one = self.by_id.get(id(owner), (-1, None))
            if one is not None and any(ref() is owner for ref in one.refs):
                self.note_use(at, SEEK if name == "seek" else READ if name in READS else 0)
        elif name in ("lseek", "read") and getattr(owner, "__name__", "") == "posix":
            for at in self.bare:
                self.note_use(at, SEEK if name == "lseek" else READ)
        elif name in INNER_READS and type(owner).__name__ == "module":
            self.of_all |= READ
        elif type(owner).__name__ == "SemLock" or getattr(owner, "__name__", "") == "fcntl" or (name in UNLOCKS and getattr(owner, "__name__", "") == "posix"):
            self.of_all |= LOCK

    def note_use(self, at: int, flag: int) -> None:
        self.flags[at] |= flag
        if not self.flags[at] & MOVED:
            self.note_position(at)

    def note_position(self, at: int) -> None:
        """What stands in a reader's buffer is read without it."""
        if self.files[at].still_open and (now := self.files[at].position) != self.last[at]:
            self.flags[at] |= MOVED
            self.last[at] = now


RACE = SEEK | READ | MOVED


def races(flags: int) -> bool:
    return flags & (RACE | LOCK) == RACE


# ---- the workers of a loader ----
_before_fork: list[Held] = []  # of the loader whose workers are being started: they inherit it
_noted: weakref.WeakKeyDictionary[Any, list[tuple[str, sites.Site | None]]] = weakref.WeakKeyDictionary()  # by the page that they tell through


@contained
def note(loader: Any, page: Any, start: int) -> None:
    """In the rank, before `iter(loader)` forks the workers."""
    files = of(loader.dataset) if loader.num_workers > 1 else []
    certain = getattr(loader, "worker_init_fn", None) is None and sum(not f.refs for f in files) < 2
    _before_fork[:] = files if certain else [f for f in files if f.refs]  # a bare number may be opened again there, or be another worker's
    names = [(f.name, f.made) for f in _before_fork]
    if names != _noted.get(page, []):
        _noted[page] = names
        page[start : start + BYTES] = bytes(BYTES)  # what was told is of other files


def watch_fetch(page: Any, start: int) -> Callable[[], None] | None:
    """In a worker, before one of its first fetches; what it returns is called after it."""
    if not _before_fork:
        return None
    from torch.utils.data import get_worker_info

    worker = get_worker_info()
    if worker is None or worker.id >= MAX_WORKERS:
        return None

    def tell(at: int, flags: int) -> None:
        page[start + worker.id * MAX_FILES + at] |= flags

    return watch(list(_before_fork), tell)


def told(page: Any, start: int) -> dict[str, Any] | None:
    """In the rank: name and site (where it is opened) of a file that several workers seek and read in, and how many they are."""
    found: tuple[int, int] = (1, -1)
    for at, _ in enumerate(_noted.get(page, [])):
        flags = [page[start + worker * MAX_FILES + at] for worker in range(MAX_WORKERS)]
        if not any(f & LOCK for f in flags):
            found = max(found, (sum(map(races, flags)), at))
    if found[0] < 2:
        return None
    name, made = _noted[page][found[1]]
    return {"name": name, "workers": found[0], "site": sites.as_json(made) if made is not None else None}
