"""What the data loaders drew. The iterator's class is patched, never an iterator: keeping one alive makes loaders with workers hang.

Event "loader" (each `iter(loader)`): loop, loader (order of construction), made, made_sampler, made_generator, made_lasting (where persistent
workers are asked for), made_dataset (nearest first; all sites), base_seed (of the workers), copies (see workercopies.py), aside (a
thread of the script's draws ahead), what `datasets.describe` says of sampler, dataset, workers.
Event "pass" (end of a pass over it): loop, num_batches, num_samples, order (digest of the indices in order), indices (zlib+base64 of uint32,
at most 65,536), rows (the same of a digest a sample), labels, shapes (how large the samples are, a number each, or one for all: padded to the longest
of its batch, one looks different in another), content (digest of all rows in order), batch_sizes [first, smallest, last], weighed [batches, numbers in
them] (first 256 steps), backwards, first_trained (batches drawn when the first one came), collectives, steps, complete, grad (grad mode on), training (a trained or
wrapped module was in train mode), file (see sharedfiles.py), data_s, times [start, first, last, end] (seconds: in `iter(loader)`, until the first batch, from
it to the last one, in the call that found the end), worker_random ([torch, python, numpy, own] generators drawn from for each sample in a worker), worker_seeds
(first 8 workers: what [torch, python, numpy] are seeded with), worker_own (see copiedrng.py), own [before, after] (states of the dataset's own generators),
switch (see layers.py), let_go (the iterator was gone before a backward followed its last batch). Event "dataset": loop, attributes {name: [ordered digest,
sorted digest, length, site]} of what the dataset keeps in sequences, strided: see strides.py, resampled: see resampling.py, reader_sum, reader_stride: see
readersums.py, own_order: see ownorders.py, worker_group: see workergroups.py. Event "loop" (first time a statement iterates a loader): of="loader", exits and
ranges of this loop and those around it, see `origins.loops`, whole: see overwhole.py, batch_means: see batchmeans.py. Event "set_epoch": epoch, sampler. Event
"join": a Join context was entered.
"""

from __future__ import annotations

import mmap
import sys
import threading
import time
import weakref
from array import array
from functools import partial
from typing import Any

from .. import (
    batchmeans,
    copiedrng,
    crossed,
    datasets,
    digests,
    origins,
    overwhole,
    ownorders,
    readersums,
    resampling,
    sharedfiles,
    sites,
    strides,
    workercopies,
    workerdraws,
    workergroups,
    workerseeds,
)
from ..arm import at_close
from ..datasets import pack
from ..patching import before, quiet, wrap
from ..state import S, mix
from . import heldbatches, layers, rng

MAX_KEPT = datasets.MAX_KEPT
MAX_KEPT_IN_ALL = 300_000  # indices and digests of a process: 1.6 MB of recording; later passes keep their first 256
_loader_ids: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_pages: weakref.WeakKeyDictionary[Any, mmap.mmap] = weakref.WeakKeyDictionary()
_loops = [0]
_kept = [0]
_drawn = [0]
_passes: dict[int, Pass] = {}  # id of iterator -> its open pass
_told_datasets: set[int] = set()
_told_loops: set[tuple[str, int]] = set()


class Pass:
    """One pass over a loader."""

    def __init__(self, iterator: Any, loader: Any, site: sites.Site) -> None:
        self.loop = _loops[0]
        _loops[0] += 1
        self.loader = _loader_ids.setdefault(loader, len(_loader_ids))
        self.site = site
        self.iterator = weakref.ref(iterator, partial(_dropped, id(iterator)))
        self.indices: list[int] = []
        self.asked: list[int] = []  # how many indices each batch was asked for; 0: the loader does not batch
        self.iterable = datasets.is_iterable(loader.dataset)
        self.order = self.content = 0
        self.rows: list[int] = []
        self.labels: list[int] = []
        self.shapes: list[int] = []
        self.sizes, self.weighed = [0, 1 << 60, 0], [0, 0]
        self.num_batches = self.num_samples = self.backwards = self.collectives = self.first_trained = 0
        self.step_before = S.steps
        self.grad = self.training = False
        self.data_s = 0.0
        self.times = [0.0, 0.0, 0.0, 0.0]
        self.first_at = 0.0  # when the first batch was there
        self.room = MAX_KEPT if _kept[0] < MAX_KEPT_IN_ALL else 256
        self.drawn_at = 0  # how many batches the process had drawn when this one's last came
        self.page = _pages.get(loader)
        self.num_workers = int(loader.num_workers)
        self.dataset = weakref.ref(loader.dataset) if hasattr(type(loader.dataset), "__weakref__") else None
        self.own = datasets.own_generators(loader.dataset)
        self.body = layers.Body()
        self.first: list[weakref.ref[Any]] = []  # a tensor of each of the first batches

    def note_time(self, took_s: float) -> None:
        now = time.perf_counter()
        if self.num_batches == 1:
            self.first_at, self.times[1] = now, took_s
        self.times[2] = now - self.first_at

    def note_backward(self) -> None:
        self.backwards += 1
        self.first_trained = self.first_trained or self.num_batches

    def let_go(self) -> None:
        """The iterator is gone. `next(iter(loader))` leaves a batch behind that may be trained on: the next backward tells."""
        if self in S.loops and self.num_batches and not self.backwards and self.grad and self.training and len(S.let_go) < 8:
            S.loops.remove(self)
            S.let_go.append(self)
        else:
            self.finish(False)

    @staticmethod
    def settle() -> None:
        """A backward: it is of the batches let go of, unless a pass that still runs has drawn one since."""
        newest = max((p.drawn_at for p in S.loops), default=0)
        for one in list(S.let_go):
            one.backwards += one.drawn_at > newest
            one.finish(False)

    def finish(self, complete: bool) -> None:
        if self not in S.loops and self not in S.let_go:
            return
        let_go = self in S.let_go
        (S.let_go if let_go else S.loops).remove(self)
        if complete and not self.backwards:
            heldbatches.note(self.loop, self.first)
        _kept[0] += len(self.indices) + len(self.rows) + len(self.labels)
        dataset = self.dataset() if self.dataset is not None else None
        S.recorder.event(
            "pass", self.site, loop=self.loop, loader=self.loader, num_batches=self.num_batches, num_samples=self.num_samples,
            order=self.order,
            indices=pack(self.indices), rows=pack(self.rows), labels=pack(self.labels), shapes=datasets.pack_alike(self.shapes),
            content=self.content, batch_sizes=self.sizes, weighed=self.weighed, backwards=self.backwards, first_trained=self.first_trained,
            collectives=self.collectives, steps=S.steps - self.step_before, complete=complete, grad=self.grad,
            training=self.training, data_s=round(self.data_s, 6),
            times=[round(t, 5) for t in self.times], worker_random=list(self.page[:4]) if self.page is not None else None,
            worker_seeds=workerseeds.told(self.page, self.num_workers) if self.page is not None else None,
            worker_own=self._copied(dataset),
            file=sharedfiles.told(self.page, workerdraws.FILES_AT) if self.page is not None else None,
            own=[self.own, datasets.own_generators(dataset)] if self.own and dataset is not None else None,
            switch=self.body.told() if not self.backwards else None, let_go=let_go and self.backwards > 0,
        )  # fmt: skip

    def _copied(self, dataset: Any) -> dict[str, Any] | None:
        return copiedrng.told(dataset, self.page, workerdraws.COPIES_AT, self.num_workers) if self.page is not None and dataset is not None else None


def open_pass(iterator: int) -> Pass | None:
    """By the id of its iterator."""
    return _passes.get(iterator)


def _dropped(key: int, _ref: Any) -> None:
    found = _passes.pop(key, None)
    if found is not None:
        quiet(found.let_go)()


@quiet
def _opened(iterator: Any, loader: Any, site: sites.Site, stack: list[sites.Site], took_s: float = 0.0, copies: Any = None) -> None:
    one = Pass(iterator, loader, site)
    one.times[0] = took_s
    for other in [p for p in (*S.loops, *S.let_go) if p.loader == one.loader]:
        other.finish(False)
    _passes[id(iterator)] = one
    S.loops.append(one)
    base_seed = getattr(iterator, "_base_seed", None) if loader.num_workers else None
    told = {**_made.get(id(loader), {}), **datasets.describe(loader), "aside": threading.current_thread() is not threading.main_thread()}
    S.recorder.event("loader", site, loop=one.loop, loader=one.loader, base_seed=base_seed, copies=copies, **told)
    if id(loader.dataset) not in _told_datasets:
        _told_datasets.add(id(loader.dataset))
        kind, stream = type(loader.dataset).__name__, one.iterable
        made = _made.get(id(loader), {}).get("made_dataset")
        strided, attributes = strides.told(loader.dataset, made), datasets.fingerprint(loader.dataset)
        ways = {"worker_group": workergroups.told(loader), "own_order": ownorders.told(loader.dataset, made), **readersums.of(loader)} if stream else {}
        S.recorder.event(
            "dataset", site, loop=one.loop, loader=one.loader, kind=kind, attributes=attributes, drawn=[*rng.early], strided=strided,
            resampled=stream and resampling.told(loader.dataset), **ways,
        )  # fmt: skip
    if site[:2] not in _told_loops and site[0]:
        _told_loops.add(site[:2])
        told = {"whole": overwhole.told(site, _made.get(id(loader))), "batch_means": batchmeans.told(site)}
        S.recorder.event("loop", site, of="loader", **told, **origins.loops(stack))


_made: dict[int, dict[str, Any]] = {}
_copies = quiet(workercopies.told)


@quiet
def _drew(one: Pass, batch: Any, took_s: float) -> None:
    import torch

    one.num_batches += 1
    one.note_time(took_s)
    _drawn[0] += 1
    one.drawn_at = _drawn[0]
    one.data_s += took_s
    S.since.data_s += took_s
    tensors = digests.of_batch(batch)
    size = _batch_size(one, tensors, batch)
    one.num_samples += size
    one.grad = torch.is_grad_enabled()
    if one.grad:  # else it is measured on: no batch of the step
        S.since.num_batches += 1
        S.since.num_samples += size
    S.batch_rows = size
    crossed.drew(tensors)
    one.sizes = [one.sizes[0] or size, min(one.sizes[1], size), size]
    one.weighed = datasets.weighed(one.weighed, tensors) if S.steps < 256 else one.weighed
    one.training = one.training or layers.any_training()
    if tensors:
        if len(one.first) < heldbatches.NUM_FIRST:
            one.first.append(weakref.ref(tensors[0]))
        content = _note_samples(one, tensors, size)
        if not S.ddps:
            S.since.batch = mix(S.since.batch, content or digests.of_tensors([t for t in tensors[:4] if t.device.type == "cpu"])[0])
    S.recorder.progress()
    one.body.begins(one)


def _batch_size(one: Pass, tensors: list[Any], batch: Any) -> int:
    """Samples in the batch just drawn: as many as indices were asked for; for a stream the first dimension of the first tensor."""
    if not one.iterable and one.num_batches <= len(one.asked) and one.asked[one.num_batches - 1]:
        return one.asked[one.num_batches - 1]
    return int(tensors[0].shape[0]) if tensors and tensors[0].dim() else (len(batch) if isinstance(batch, (list, tuple)) else 1)


def _note_samples(one: Pass, tensors: list[Any], size: int) -> int:
    """A digest a sample, of the tensors that hold one entry a sample; the last of several is taken as the label. Returns the batch's."""
    if len(one.rows) >= one.room:
        return 0
    whole = [t for t in tensors if t.dim() and t.shape[0] == size and t.device.type == "cpu"]
    if not whole:
        return 0
    rows = datasets.row_digests(whole[0])
    for more in whole[1:-1][:3]:
        rows = [mix(a, b) & 0xFFFFFFFF for a, b in zip(rows, datasets.row_digests(more), strict=True)]
    one.rows.extend(rows)
    one.shapes.extend([datasets.shapes(whole, size)] * len(rows))
    digest = digests.wide(array("Q", rows).tobytes())
    if len(whole) > 1:
        labels = datasets.row_digests(whole[-1])
        one.labels.extend(labels)
        digest = mix(digest, digests.wide(array("Q", labels).tobytes()))
    one.content = mix(one.content, digest)
    return digest


@quiet
def _body_ends(one: Pass) -> None:
    one.body.ends(one)


def _next(original: Any) -> Any:
    def __next__(self: Any) -> Any:
        if S.busy or S.recorder.disabled:
            return original(self)
        one = _passes.get(id(self))
        if one is not None:
            _body_ends(one)
        S.recorder.enter("data", one.site if one else sites.UNKNOWN)
        began = time.perf_counter()
        try:
            batch = original(self)
        except StopIteration:
            S.recorder.leave()
            if one is not None:
                _passes.pop(id(self), None)
                one.times[3] = time.perf_counter() - began
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
    one.asked.append(len(batch) if batch is index else 0)
    numbers = [int(i) for i in batch if isinstance(i, int) or hasattr(i, "__index__")]
    if numbers:
        digest = digests.wide(array("q", numbers).tobytes())
        one.order, S.since.index = mix(one.order, digest), mix(S.since.index, digest)
    one.indices.extend(numbers[: max(0, one.room - len(one.indices))])


def _iter(original: Any) -> Any:
    def __iter__(self: Any) -> Any:
        if S.busy or S.recorder.disabled:
            return original(self)
        stack = sites.stack(2)
        held = getattr(self, "_iterator", None)  # persistent workers hand out the same iterator again
        stale = _passes.pop(id(held), None) if held is not None else None
        if stale is not None:
            quiet(stale.finish)(False)
        quiet(_share_page)(self)
        began = time.perf_counter()
        iterator = original(self)
        took_s = time.perf_counter() - began
        workerdraws.page[0] = None
        _opened(iterator, self, stack[0] if stack else sites.UNKNOWN, stack, took_s, _copies(self))
        for index in _early.pop(id(iterator), []):
            if id(iterator) in _passes:
                note_index(_passes[id(iterator)], index)
        return iterator

    return __iter__


def _share_page(loader: Any) -> None:
    """Memory that forked workers share with us: which generators moved while they fetched, and what each worker's were seeded with."""
    if loader.num_workers and loader not in _pages:
        _pages[loader] = mmap.mmap(-1, workerdraws.PAGE_BYTES)
    workerdraws.page[0] = _pages.get(loader)
    if loader in _pages:
        sharedfiles.note(loader, _pages[loader], workerdraws.FILES_AT)


def _note_made(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not S.recorder.disabled:
            _remember_made(self)

    return __init__


@quiet
def _remember_made(loader: Any) -> None:
    _made[id(loader)] = origins.of_loader(loader, sys._getframe(3), sites.here(4))


def _note_epoch(sampler: Any, epoch: Any, stack: list[sites.Site]) -> None:
    site = origins.epoch_origin(stack) or (stack[0] if stack else sites.UNKNOWN)
    S.recorder.event("set_epoch", site, epoch=epoch if isinstance(epoch, int) else repr(epoch), sampler=id(sampler))


def _set_epoch(original: Any) -> Any:
    note = quiet(_note_epoch)

    def set_epoch(self: Any, epoch: Any) -> Any:
        note(self, epoch, sites.stack(2, 2))
        return original(self, epoch)

    return set_epoch


def _note_join(*args: Any, **kwargs: Any) -> None:
    S.recorder.event("join", sites.here(4))


def finish_all() -> None:
    for one in (*S.loops, *S.let_go):
        one.finish(False)


def arm() -> None:
    from torch.distributed.algorithms import join
    from torch.utils.data import DataLoader, DistributedSampler
    from torch.utils.data import dataloader as module
    from torch.utils.data._utils import fetch

    wrap(DataLoader, "__init__", _note_made)
    wrap(DataLoader, "__iter__", _iter)
    wrap(module._BaseDataLoaderIter, "__next__", _next)
    wrap(module._BaseDataLoaderIter, "_next_index", _next_index)
    wrap(fetch._MapDatasetFetcher, "fetch", workerdraws.fetching)
    wrap(fetch._IterableDatasetFetcher, "fetch", workerdraws.fetching)
    wrap(DistributedSampler, "set_epoch", _set_epoch)
    before(join.Join, "__enter__", _note_join)
    at_close.append(quiet(finish_all))

