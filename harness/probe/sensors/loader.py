"""What the data loaders drew. The iterator's class is patched, never an iterator: keeping one alive makes loaders with workers hang.

Event "loader" (each `iter(loader)`): loop, loader (order of construction), what `describe` says of sampler, dataset, workers.
Event "pass" (end of a pass over it): loop, num_batches, num_samples, order (digest of the indices in order), indices (zlib+base64 of
uint32, at most 65,536), rows (the same of a digest a sample), labels, batch_sizes [first, smallest, last], backwards, collectives, steps, complete, grad (grad
mode on), training (a wrapped or trained module was in train mode), data_s.
Event "dataset": loop, attributes {name: [ordered digest, sorted digest, length]} of what the dataset keeps in sequences.
"""

from __future__ import annotations

import base64
import struct
import time
import weakref
import zlib
from typing import Any

from .. import digests, sites
from ..arm import at_close
from ..patching import quiet, wrap
from ..state import S, mix

MAX_KEPT = 65_536
_loader_ids: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_loops = [0]
_passes: dict[int, Pass] = {}  # id of iterator -> its open pass
_told_datasets: set[int] = set()


class Pass:
    """One pass over a loader."""

    def __init__(self, iterator: Any, loader: Any, site: sites.Site) -> None:
        self.loop = _loops[0]
        _loops[0] += 1
        self.loader = _loader_ids.setdefault(loader, len(_loader_ids))
        self.site = site
        self.iterator = weakref.ref(iterator, lambda _r, key=id(iterator): _dropped(key))
        self.indices: list[int] = []
        self.order = 0
        self.rows: list[int] = []
        self.labels: list[int] = []
        self.sizes = [0, 1 << 60, 0]
        self.num_batches = self.num_samples = self.backwards = self.collectives = 0
        self.step_before = S.steps
        self.grad = self.training = False
        self.data_s = 0.0
        self.last_batch = 0

    def finish(self, complete: bool) -> None:
        if self not in S.loops:
            return
        S.loops.remove(self)
        S.recorder.event(
            "pass", self.site, loop=self.loop, loader=self.loader, num_batches=self.num_batches, num_samples=self.num_samples, order=self.order,
            indices=_pack(self.indices), rows=_pack(self.rows), labels=_pack(self.labels), batch_sizes=self.sizes, backwards=self.backwards,
            collectives=self.collectives, steps=S.steps - self.step_before, complete=complete, grad=self.grad, training=self.training,
            data_s=round(self.data_s, 6),
        )  # fmt: skip


def _pack(values: list[int]) -> str:
    if not values:
        return ""
    return base64.b64encode(zlib.compress(struct.pack(f"<{len(values)}I", *(v & 0xFFFFFFFF for v in values)), 1)).decode()


def _dropped(key: int) -> None:
    found = _passes.pop(key, None)
    if found is not None:
        quiet(found.finish)(False)


def describe(loader: Any) -> dict[str, Any]:
    """Sampler, dataset and workers of a loader, as plain values."""
    sampler = getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    chain = [sampler, inner]
    distributed = next((s for s in chain if s is not None and hasattr(s, "num_replicas") and hasattr(s, "rank")), None)
    dataset = loader.dataset
    told: dict[str, Any] = {
        "sampler": type(sampler).__name__,
        "batch_sampler": type(batch_sampler).__name__,
        "custom_batch_sampler": batch_sampler is not None and not type(batch_sampler).__module__.startswith("torch."),
        "custom_sampler": sampler is not None and not type(sampler).__module__.startswith("torch."),
        "dataset": type(dataset).__name__,
        "dataset_len": _length(dataset),
        "iterable": _is_iterable(dataset),
        "subset": _subset(dataset),
        "num_workers": int(loader.num_workers),
        "persistent": bool(getattr(loader, "persistent_workers", False)),
        "batch_size": loader.batch_size if isinstance(loader.batch_size, int) else None,
        "drop_last": bool(getattr(loader, "drop_last", False)),
        "replacement": bool(getattr(sampler, "replacement", False)),
        "generator_seed": _seed(getattr(sampler, "generator", None) or getattr(loader, "generator", None)),
    }
    if distributed is not None:
        told["distributed"] = {
            "kind": type(distributed).__name__,
            **{k: getattr(distributed, k, None) for k in ("num_replicas", "rank", "epoch", "seed", "shuffle", "drop_last", "total_size", "num_samples")},
            "dataset_len": _length(getattr(distributed, "dataset", None)),
        }
    return told


def _length(thing: Any) -> int:
    try:
        return len(thing) if type(thing).__len__ is not None else -1  # type: ignore[attr-defined]
    except (TypeError, AttributeError, NotImplementedError):
        return -1


def _is_iterable(dataset: Any) -> bool:
    from torch.utils.data import IterableDataset

    return isinstance(dataset, IterableDataset)


def _subset(dataset: Any) -> dict[str, Any] | None:
    indices = getattr(dataset, "indices", None)
    if type(dataset).__name__ != "Subset" or not isinstance(indices, (list, tuple, range)):
        return None
    head = list(indices[:MAX_KEPT])
    try:
        return {"num": len(indices), "order": zlib.crc32(repr(head).encode()), "set": zlib.crc32(repr(sorted(head)).encode()),
                "of": _length(dataset.dataset), "indices": _pack([int(i) for i in head[:8192]])}  # fmt: skip
    except TypeError:
        return None


def _seed(generator: Any) -> int | None:
    return int(generator.initial_seed()) if generator is not None and hasattr(generator, "initial_seed") else None


def _fingerprint(dataset: Any, depth: int = 0) -> dict[str, list[int]]:
    """Sequences that the dataset keeps: digest in order, digest of the sorted elements, length. Reads attributes, calls nothing of it."""
    found: dict[str, list[int]] = {}
    if depth > 2 or not hasattr(dataset, "__dict__"):
        return found
    for name, value in list(vars(dataset).items())[:40]:
        if isinstance(value, (list, tuple)) and 1 < len(value) <= 200_000 and isinstance(value[0], (str, int, float, tuple, bytes)):
            texts = [repr(v)[:200] for v in value[:20_000]]
            found[name] = [zlib.crc32("\n".join(texts).encode()), zlib.crc32("\n".join(sorted(texts)).encode()), len(value)]
        elif hasattr(value, "__dict__") and type(value).__module__ != "builtins" and not hasattr(value, "parameters"):
            for key, entry in _fingerprint(value, depth + 1).items():
                found[f"{name}.{key}"] = entry
    return found


@quiet
def _opened(iterator: Any, loader: Any, site: sites.Site) -> None:
    one = Pass(iterator, loader, site)
    for other in [p for p in S.loops if p.loader == one.loader]:
        other.finish(False)
    _passes[id(iterator)] = one
    S.loops.append(one)
    S.recorder.event("loader", site, loop=one.loop, loader=one.loader, made=_made.get(id(loader)), **describe(loader))
    if id(loader.dataset) not in _told_datasets:
        _told_datasets.add(id(loader.dataset))
        S.recorder.event("dataset", site, loop=one.loop, loader=one.loader, kind=type(loader.dataset).__name__, attributes=_fingerprint(loader.dataset))


_made: dict[int, Any] = {}


@quiet
def _drew(one: Pass, batch: Any, took_s: float) -> None:
    import torch

    one.num_batches += 1
    one.data_s += took_s
    S.since.data_s += took_s
    S.since.num_batches += 1
    tensors = digests.of_batch(batch)
    size = int(tensors[0].shape[0]) if tensors and tensors[0].dim() else (len(batch) if isinstance(batch, (list, tuple)) else 1)
    one.num_samples += size
    S.since.num_samples += size
    S.batch_rows = size
    one.sizes = [one.sizes[0] or size, min(one.sizes[1], size), size]
    one.grad = torch.is_grad_enabled()
    one.training = one.training or _any_training()
    if tensors:
        content = digests.of_tensors(tensors[:4])[0]
        one.last_batch = content
        if not S.ddps:
            S.since.batch = mix(S.since.batch, content)
        if len(one.rows) < MAX_KEPT and tensors[0].dim() and tensors[0].device.type == "cpu":
            one.rows.extend(digests.of_rows(tensors[0]))
        if len(one.labels) < MAX_KEPT and len(tensors) > 1 and tensors[-1].dim() and tensors[-1].device.type == "cpu" and tensors[-1].shape[0] == size:
            one.labels.extend(digests.of_rows(tensors[-1], width=4))
    S.recorder.progress()


def _any_training() -> bool:
    return not S.ddps or any((m := w.ref()) is not None and m.training for w in S.ddps)


def _next(original: Any) -> Any:
    def __next__(self: Any) -> Any:
        if S.busy or S.recorder.disabled:
            return original(self)
        one = _passes.get(id(self))
        S.recorder.enter("data", one.site if one else sites.UNKNOWN)
        began = time.perf_counter()
        try:
            batch = original(self)
        except StopIteration:
            S.recorder.leave()
            if one is not None:
                _passes.pop(id(self), None)
                quiet(one.finish)(True)
            raise
        S.recorder.leave()
        if one is not None:
            _drew(one, batch, time.perf_counter() - began)
        return batch

    return __next__


def _next_index(original: Any) -> Any:
    def _next_index(self: Any) -> Any:
        index = original(self)
        one = _passes.get(id(self))
        if one is not None:
            note_index(one, index)
        elif not S.recorder.disabled:
            _early.setdefault(id(self), []).append(index)  # prefetched inside __init__, before the pass is known
        return index

    return _next_index


_early: dict[int, list[Any]] = {}


@quiet
def note_index(one: Pass, index: Any) -> None:
    batch = index if isinstance(index, (list, tuple)) else [index]
    numbers = [int(i) for i in batch if isinstance(i, int) or hasattr(i, "__index__")]
    for number in numbers:
        one.order = mix(one.order, number + 1)
        S.since.index = mix(S.since.index, number + 1)
    room = MAX_KEPT - len(one.indices)
    one.indices.extend(numbers[:room])


def _iter(original: Any) -> Any:
    def __iter__(self: Any) -> Any:
        if S.busy or S.recorder.disabled:
            return original(self)
        site = sites.here(2)
        iterator = original(self)
        stale = _passes.pop(id(iterator), None)  # persistent workers hand out the same iterator again
        if stale is not None:
            quiet(stale.finish)(False)
        _opened(iterator, self, site)
        for index in _early.pop(id(iterator), []):
            if id(iterator) in _passes:
                note_index(_passes[id(iterator)], index)
        return iterator

    return __iter__


def _note_made(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        site = sites.here(2)
        original(self, *args, **kwargs)
        _made[id(self)] = sites.as_json(site)

    return __init__


def _set_epoch(original: Any) -> Any:
    note = quiet(lambda self, epoch, site: S.recorder.event("set_epoch", site, epoch=epoch if isinstance(epoch, int) else repr(epoch), sampler=id(self)))

    def set_epoch(self: Any, epoch: Any) -> Any:
        note(self, epoch, sites.here(2))
        return original(self, epoch)

    return set_epoch


def finish_all() -> None:
    for one in list(S.loops):
        one.finish(False)


def arm() -> None:
    from torch.utils.data import DataLoader, DistributedSampler
    from torch.utils.data import dataloader as module

    wrap(DataLoader, "__init__", _note_made)
    wrap(DataLoader, "__iter__", _iter)
    wrap(module._BaseDataLoaderIter, "__next__", _next)
    wrap(module._BaseDataLoaderIter, "_next_index", _next_index)
    wrap(DistributedSampler, "set_epoch", _set_epoch)
    at_close.append(quiet(finish_all))
