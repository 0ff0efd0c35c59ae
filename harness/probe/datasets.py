"""What a data loader is made of, as plain values: sampler, dataset, workers. Reads attributes; calls nothing of the user's but `len`."""

from __future__ import annotations

import base64
import ctypes
import os
import struct
import sys
import weakref
import zlib
from typing import Any
from zlib import crc32

from . import digests, origins, repeats, sites

MAX_KEPT = 65_536
_bases: dict[tuple[int, str, int], tuple[int, weakref.ref[Any] | None]] = {}  # (id, type, length) of a dataset -> number, and the dataset
_num_bases = [0]
EPOCH_WORDS = ("epoch", "seed", "round", "cycle", "shuffle")


def pack(values: list[int]) -> str:
    """uint32 values as zlib + base64."""
    if not values:
        return ""
    return base64.b64encode(zlib.compress(struct.pack(f"<{len(values)}I", *(v & 0xFFFFFFFF for v in values)), 1)).decode()


def pack_alike(values: list[int]) -> str | int:
    """The value itself, where all are the same one."""
    return values[0] if values and min(values) == max(values) else pack(values)


def shapes(tensors: list[Any], num: int) -> int:
    """A number for how large each of a sample's tensors is, of `num` samples; 0.1 us a tensor."""
    return hash(tuple([t.numel() // num for t in tensors])) & 0xFFFFFFFF if num else 0


def weighed(known: list[int], tensors: list[Any]) -> list[int]:
    """[batches, numbers in all of their tensors], with one batch more; 0.1 us a tensor."""
    return [known[0] + 1, known[1] + sum([t.numel() for t in tensors])]


def describe(loader: Any) -> dict[str, Any]:
    """Sampler, dataset and workers of a loader, as plain values."""
    sampler = getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    chain = [s for s in (sampler, inner, batch_sampler) if s is not None]
    distributed = next((s for s in chain if hasattr(s, "num_replicas") and hasattr(s, "rank")), None)
    keeper = next((s for s in (distributed, batch_sampler, sampler, inner) if s is not None and hasattr(s, "set_epoch")), None)
    dataset = loader.dataset
    told: dict[str, Any] = {
        "sampler": type(sampler).__name__,
        "batch_sampler": type(batch_sampler).__name__,
        "custom_batch_sampler": _custom(batch_sampler),
        "custom_sampler": _custom(sampler) or _custom(inner),
        "repeats": any(repeats.told(s) for s in (sampler, inner) if _custom(s)),
        "set_epoch": keeper is not None,
        "sampler_epoch": _number(getattr(keeper, "epoch", None)),
        "sampler_seed": _number(getattr(keeper, "seed", None)),
        "dataset": type(dataset).__name__,
        "dataset_id": number_of(dataset),
        "dataset_len": length(dataset),
        "iterable": is_iterable(dataset),
        "subset": _subset(dataset),
        "epochs": epoch_attributes(dataset),
        "num_workers": int(loader.num_workers),
        "persistent": bool(getattr(loader, "persistent_workers", False)),
        "batch_size": loader.batch_size if isinstance(loader.batch_size, int) else None,
        "drop_last": bool(getattr(loader, "drop_last", False)),
        "planned": _planned(loader),
        "replacement": any(bool(getattr(s, "replacement", False)) for s in chain),
        "generator_seed": _seed(getattr(sampler, "generator", None) or getattr(loader, "generator", None)),
        "dealt": _dealt(chain, dataset),
        "threads": _threads(loader) if loader.num_workers else None,
        "iter_at": sites.as_json(origins.worker_line(type(dataset)) or sites.UNKNOWN),
    }
    if distributed is not None:
        told["distributed"] = {
            "kind": type(distributed).__name__,
            **{
                k: _number(getattr(distributed, k, None))
                for k in ("num_replicas", "rank", "epoch", "seed", "shuffle", "drop_last", "total_size", "num_samples")
            },
            "dataset_len": length(getattr(distributed, "dataset", None)),
            "id": id(distributed),
        }
    return told


def _dealt(chain: list[Any], dataset: Any) -> dict[str, Any] | None:
    """The data set that the sampler deals out, where it is not the loader's own: its kind and length; a first part, where it is one on purpose."""
    for sampler in [s for s in chain if type(s).__module__.startswith("torch.") and hasattr(s, "__dict__")]:
        other = next((v for k in ("dataset", "data_source") if (v := vars(sampler).get(k)) is not None), None)
        num = -1 if other is None or other is dataset else length(other)
        if num < 0 or num == length(dataset):
            continue
        inside = _subset(other)
        first = inside is not None and inside["base"] == number_of(dataset) and inside["order"] == zlib.crc32(repr(list(range(num))).encode())
        return {"kind": type(other).__name__, "len": num, "first": first, "plain": isinstance(other, (range, list, tuple, set))}
    return None


def _threads(loader: Any) -> dict[str, Any]:
    """Of the process that starts the workers: threads that torch computes with, threads that there are, and how workers begin."""
    import multiprocessing

    import torch

    context = getattr(loader, "multiprocessing_context", None)
    method = context.get_start_method() if context is not None else multiprocessing.get_start_method(allow_none=True) or "fork"
    try:
        there = len(os.listdir("/proc/self/task"))
    except OSError:
        there = 0
    return {"torch": torch.get_num_threads(), "process": there, "method": method}


def _custom(sampler: Any) -> bool:
    return sampler is not None and not type(sampler).__module__.startswith("torch.") and not isinstance(sampler, (list, tuple, range))


def _number(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float)) else None


def number_of(dataset: Any) -> int:
    """Datasets by order of first sight; a base dataset is numbered too (see `_subset`). A new one may lie where one lay that is gone, on one rank and
    not on another; of what takes no weak reference, a list, that is not known."""
    key = (id(dataset), type(dataset).__name__, length(dataset))
    number, known = _bases.get(key, (-1, None))
    if number < 0 or (known is not None and known() is not dataset):
        number, _num_bases[0] = _num_bases[0], _num_bases[0] + 1
        _bases[key] = (number, _weakly(dataset))
    return number


def _weakly(dataset: Any) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(dataset)
    except TypeError:
        return None


def length(thing: Any) -> int:
    """len() of a dataset; -1 where it has none. A user's `__len__` may raise anything."""
    try:
        return len(thing) if type(thing).__len__ is not None else -1
    except Exception:
        return -1


def _planned(loader: Any) -> int | None:
    """len(loader) for a loader over a map-style dataset; asking an iterable one would make torch count and warn."""
    if is_iterable(loader.dataset):
        return None
    try:
        return len(loader)
    except Exception:
        return None


def is_iterable(dataset: Any) -> bool:
    """Whether a loader draws from it without indices."""
    from torch.utils.data import IterableDataset

    return isinstance(dataset, IterableDataset)


def _subset(dataset: Any) -> dict[str, Any] | None:
    """The Subsets that a dataset is, or wraps (one of the same length): indices into the innermost data set."""
    chosen: list[int] | None = None
    for _ in range(4):
        if type(dataset).__name__ != "Subset":
            inner = [v for v in vars(dataset).values() if type(v).__name__ == "Subset"] if hasattr(dataset, "__dict__") else []
            if len(inner) != 1 or length(inner[0]) != length(dataset):
                break
            dataset = inner[0]
        indices = dataset.indices
        if type(indices).__name__ in ("Tensor", "ndarray"):
            indices = indices.tolist()
        if not isinstance(indices, (list, tuple, range)) or not indices or not all(hasattr(i, "__index__") for i in indices[:1]):
            return None
        own = [int(i) for i in indices[:MAX_KEPT]]
        chosen = own if chosen is None else [own[i] for i in chosen if i < len(own)]
        dataset = dataset.dataset
    if chosen is None:
        return None
    return {
        "num": len(chosen),
        "order": zlib.crc32(repr(chosen).encode()),
        "set": zlib.crc32(repr(sorted(chosen)).encode()),
        "of": length(dataset),
        "base": number_of(dataset),
        "indices": pack(chosen[:8192]),
    }


def _seed(generator: Any) -> int | None:
    return int(generator.initial_seed()) if generator is not None and hasattr(generator, "initial_seed") else None


def epoch_attributes(dataset: Any, depth: int = 0) -> dict[str, Any]:
    """Plain numbers that the dataset keeps under a name like `epoch` or `seed`: they tell whether the script meant another order or
    content."""
    found: dict[str, Any] = {}
    if depth > 2 or not hasattr(dataset, "__dict__"):
        return found
    for name, value in list(vars(dataset).items())[:60]:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and any(w in name.lower() for w in EPOCH_WORDS):
            found[name] = value
        elif hasattr(value, "__dict__") and type(value).__module__ not in ("builtins", "types") and not callable(value):
            for key, entry in epoch_attributes(value, depth + 1).items():
                found[f"{name}.{key}"] = entry
    return found


def own_generators(dataset: Any) -> dict[str, int]:
    """Digests of the states of random generators that the dataset itself owns: torch's, numpy's, python's."""
    found: dict[str, int] = {}
    if not hasattr(dataset, "__dict__"):
        return found
    for name, value in list(vars(dataset).items())[:60]:
        state = generator_state(value)
        if state:
            found[name] = state
    inner = vars(dataset).get("dataset")
    if inner is not None:
        found.update({f"dataset.{k}": v for k, v in own_generators(inner).items()})
    return found


def generator_state(value: Any) -> int:
    """Digest of a generator's state; 0 for anything that is none."""
    import random

    import torch

    if isinstance(value, torch.Generator):
        return digests.wide(bytes(value.get_state().numpy().data)) if value.device.type == "cpu" else 0
    if isinstance(value, random.Random):
        return digests.wide(repr(value.getstate()[1]).encode())
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        if isinstance(value, numpy.random.Generator):
            return digests.wide(repr(value.bit_generator.state).encode())
        if isinstance(value, numpy.random.RandomState):
            return digests.wide(repr(value.get_state()).encode())
    return 0


def fingerprint(dataset: Any, depth: int = 0) -> dict[str, list[Any]]:
    """Sequences that the dataset keeps: digest in order, digest of the sorted elements, length, line that assigned it. At most 20,000
    elements each."""
    found: dict[str, list[Any]] = {}
    if depth > 2 or not hasattr(dataset, "__dict__"):
        return found
    for name, value in list(vars(dataset).items())[:40]:
        texts = _elements(value)
        if texts:
            at = sites.as_json(origins.attribute_line(type(dataset), name) or sites.UNKNOWN)
            found[name] = [zlib.crc32("\n".join(texts).encode()), zlib.crc32("\n".join(sorted(texts)).encode()), len(texts), at]
        elif (
            hasattr(value, "__dict__")
            and type(value).__module__ not in ("builtins", "types")
            and not hasattr(value, "parameters")
            and not callable(value)
        ):
            for key, entry in fingerprint(value, depth + 1).items():
                found[f"{name}.{key}"] = entry
    return found


def _elements(value: Any) -> list[str]:
    """Texts of the elements of a sequence, of the keys of a mapping, of the rows of a tensor or array; only what is cheap to read."""
    if isinstance(value, dict):
        value = list(value)
    elif isinstance(value, tuple) and value and type(value[0]).__name__ == "Tensor":
        value = value[0]  # the tensors of a TensorDataset
    if hasattr(value, "numel") and hasattr(value, "device"):
        plain = digests.plain(value) and value.device.type == "cpu" and value.dim() and value.is_contiguous() and 1 < len(value) <= 200_000
        return [f"{row:x}" for row in digests.of_rows(value, max_rows=20_000)] if plain else []
    if (
        type(value).__name__ == "ndarray"
        and value.size > 1
        and len(value) <= 200_000
        and value.dtype.kind in "USifu"
        and value.flags.c_contiguous
    ):
        return [f"{zlib.crc32(row.tobytes()):x}" for row in value.reshape(len(value), -1)[:20_000, :64]]
    if not isinstance(value, (list, tuple)) or not 1 < len(value) <= 200_000 or not _is_plain(value[0]):
        return []
    return [repr(v)[:200] if _is_plain(v) else type(v).__name__ for v in value[:20_000]]


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float, bytes)) or (
        isinstance(value, tuple) and len(value) < 8 and all(isinstance(v, (str, int, float, bytes)) for v in value)
    )


def row_digests(tensor: Any, max_rows: int = 512) -> list[int]:
    """A digest a row of a CPU tensor, read where it lies: whole rows up to 512 bytes, every n-th element of longer ones."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not digests.plain(tensor) or tensor.device.type != "cpu" or not tensor.is_contiguous() or not digests.has_memory(tensor):
        return digests.of_rows(tensor, max_rows)
    size = tensor.element_size()
    memory = (ctypes.c_char * (tensor.numel() * size)).from_address(tensor.data_ptr())  # as digests.to_bytes does, and for its reason
    flat = numpy.frombuffer(memory, dtype=f"V{size}").reshape(tensor.shape[0], -1)[:max_rows]
    blob = memoryview(flat[:, :: max(1, flat.shape[1] * size // 512)].tobytes())
    size = len(blob) // max(1, len(flat))
    return [crc32(blob[at : at + size]) for at in range(0, len(blob), size)] if size else []
