"""Hashes of tensors on their integer view: position counts, equal bits give equal hashes, nothing of the tensor is kept or changed.

A CPU tensor is read where it lies; a device tensor is copied once for all its samples, at few steps (steps.DEVICE_EVERY).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any
from zlib import crc32

NUM_SAMPLES = 48  # elements a tensor; smaller tensors are covered whole
SLICE_BYTES = 32_768  # rotating full coverage a step: 25 us, most of them for memory that is in no cache; every bit is read once more at the end


def wide(blob: bytes | memoryview) -> int:
    """A 64 bit digest of bytes; never 0, which means "not taken"."""
    return (crc32(blob) << 32 | crc32(blob, 0x5BD1E995)) or 1


class _Torch:
    """What is asked of torch for each tensor, looked up once a process."""

    def __init__(self) -> None:
        import torch

        self.kinds = (torch.Tensor, torch.nn.Parameter)
        self.strided = torch.strided
        self.floats = {torch.float64: 8, torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}
        self.readable = frozenset({*self.floats, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})


@cache
def _torch() -> _Torch:
    return _Torch()


def tensor_kind() -> Any:
    """torch.Tensor. What a model gives out is asked by its class: an attribute may be the user's code (`__getattr__ = dict.__getitem__`)."""
    return _torch().kinds[0]


def plain(tensor: Any) -> bool:
    """A strided tensor of a class whose memory we understand; DTensor, sparse, fake and meta tensors are not."""
    known = _torch()
    return (
        type(tensor) in known.kinds
        and tensor.layout is known.strided
        and not tensor.is_meta
        and tensor.numel() > 0
        and (tensor.dtype in known.readable or not (tensor.is_complex() or tensor.is_quantized))
    )


def local(tensor: Any) -> Any:
    """This rank's part of a DTensor, the tensor itself otherwise. Not in the row's digests: parts differ by design."""
    return tensor if plain(tensor) else getattr(tensor, "_local_tensor", tensor)


def sparse(tensor: Any) -> bool:
    """A COO tensor, as `nn.Embedding(sparse=True)` makes a gradient: it has no memory of its own, its indices and values have."""
    import torch

    return tensor.layout is torch.sparse_coo and tensor.device.type != "meta" and type(tensor) is torch.Tensor


def address(tensor: Any) -> int:
    """Where its elements lie, those of a sparse tensor too; 0 where it has no memory that could be asked."""
    try:
        return int((tensor._values() if tensor.is_sparse else tensor).data_ptr())
    except (RuntimeError, ValueError):  # ValueError: a parameter of a lazy module
        return 0


def _of_sparse(tensor: Any) -> int:
    """Of sampled indices and values, as they lie: two orders of the same rows are two digests."""
    parts = [t for t in (tensor._indices(), tensor._values()) if plain(t)]
    return crc32(b"".join(to_bytes(sampled(t)) for t in parts)) or 1


def _span(tensor: Any) -> int:
    """Number of storage elements from the first to the last element."""
    if tensor.is_contiguous():
        return int(tensor.numel())
    return int(1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)))


def has_memory(tensor: Any) -> bool:
    """Whether the storage of a plain tensor holds all of its elements: FSDP gives a gathered parameter's memory back and keeps the tensor."""
    try:
        return bool(tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + _span(tensor)) * tensor.element_size())
    except RuntimeError:
        return False


def sampled(tensor: Any, num: int = NUM_SAMPLES) -> Any:
    """A view of at most `num` evenly spaced storage elements (no copy); an empty tensor where they have no memory."""
    span = _span(tensor)
    step = max(1, -(-span // num))
    return _view_of(tensor, -(-span // step), step, tensor.storage_offset())


def _view_of(tensor: Any, num: int, step: int, start: int) -> Any:
    try:
        return tensor.as_strided((num,), (step,), start)
    except RuntimeError:  # out of the storage's bounds
        return tensor.detach().new_empty(0)


def to_bytes(flat: Any) -> bytes:
    """The bits of a flat tensor, none of one without memory. Never through numpy: that marks the storage as one that cannot be resized, and FSDP
    resizes its parameters'."""
    import torch

    if flat.device.type != "cpu":
        flat = flat.cpu()
    if not flat.numel() or not has_memory(flat):
        return b""
    flat = flat.contiguous()
    if flat.dtype is torch.bool:
        flat = flat.to(torch.uint8)
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())


_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WORDS = {1: "B", 2: "H", 4: "I", 8: "Q"}
_READ = 0x100  # PyBUF_READ


def _address(tensor: Any, span: int) -> int:
    """Where a plain CPU tensor can be read as it lies; 0 where torch has to be asked, or where there is no memory: FSDP gives a gathered parameter's
    back and keeps the tensor."""
    if tensor.dtype not in _torch().readable or tensor.is_neg():
        return 0
    try:
        whole = tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + span) * tensor.element_size()
        return int(tensor.data_ptr()) if whole else 0
    except RuntimeError:
        return 0


def bits(tensor: Any, lasting: bool = True) -> bytes | None:
    """The bits of `sampled(tensor)` of a plain CPU tensor, read where they lie: 2 us, torch's view and copy take 10. None where torch has to be asked.
    `lasting`: see of_tensors."""
    size, span = tensor.element_size(), _span(tensor)
    if not (address := _address(tensor, span)):
        return None
    memory = _view(address, span * size, _READ)
    step = -(-span // NUM_SAMPLES)
    samples = memory if step == 1 else memory.cast(_WORDS[size])[::step]
    if (lasting or span * size < MAPPED_BYTES) and tensor.is_contiguous():
        if len(_samples) >= MAX_KNOWN:
            _samples.clear()
        _samples[address] = (span, tensor.dtype, samples)
    return bytes(samples.tobytes())


# where a contiguous tensor was read -> its elements, their type, and the samples there: parameters, and mostly gradients, lie where they lay a step before.
# Looked at only through a tensor that lies there now: a bare address keeps nothing alive
_samples: dict[int, tuple[int, Any, memoryview]] = {}
MAX_KNOWN = 8192
MAPPED_BYTES = 65_536  # larger blocks come from mmap, in another place each time


def _known(tensor: Any) -> bytes | None:
    """The samples of a strided tensor of the same place, size and type as one that was read before; 1 us less than to ask for all of it again."""
    found = _samples.get(tensor.data_ptr())
    if found is None or found[0] != tensor.numel() or found[1] is not tensor.dtype or not tensor.is_contiguous() or tensor.is_neg():
        return None
    return found[2].tobytes()


def _made(tensor: Any) -> bytes | None:
    """The samples of a gradient that autograd has made: contiguous, and the whole of its memory, which is not asked again (1 us)."""
    num, width = tensor.numel(), _torch().floats.get(tensor.dtype)
    if not num or width is None or not (address := tensor.data_ptr()) or tensor.storage_offset() or not tensor.is_contiguous() or tensor.is_neg():
        return None
    samples = _view(address, num * width, _READ)
    if num > NUM_SAMPLES:
        samples = samples.cast(_WORDS[width])[:: -(-num // NUM_SAMPLES)]
    return bytes(samples.tobytes())


def any_sampled(tensor: Any) -> bool:
    """Whether a sampled element of a plain tensor is not zero."""
    found = bits(tensor) if tensor.is_cpu else None
    return bool(sampled(tensor).any()) if found is None else any_of(found, tensor.dtype)


def any_of(found: bytes, dtype: Any) -> bool:
    """Whether one of these elements, as `bits` reads them, is not zero."""
    value = int.from_bytes(found, "little")
    width = _torch().floats.get(dtype)  # minus zero is zero
    return bool(value & _unsigned(width, len(found)) if width is not None else value)


@cache
def _unsigned(width: int, num_bytes: int) -> int:
    """A mask of words without their sign."""
    return int.from_bytes((b"\xff" * (width - 1) + b"\x7f") * (num_bytes // width), "little")


def of_tensors(tensors: Sequence[Any], lasting: bool = True) -> tuple[int, list[int]]:
    """(digest of all, digest of each as uint32; 0 for a tensor that is None, neither plain nor sparse, or without memory).

    `lasting`: whether they lie where they lay at the step before, as parameters do. Where a large gradient lay is not worth remembering."""
    each = [0] * len(tensors)
    others: list[int] = []
    kinds, strided = _torch().kinds, _torch().strided
    for i, tensor in enumerate(tensors):
        if tensor is None:
            continue
        dense = type(tensor) in kinds and tensor.layout is strided and tensor.is_cpu
        if dense and (found := _known(tensor) if lasting else _made(tensor) or _known(tensor)) is not None:
            each[i] = crc32(found) or 1
        elif not plain(tensor):
            if sparse(tensor):
                each[i] = _of_sparse(tensor)
        elif tensor.is_cpu and (found := bits(tensor, lasting)) is not None:
            each[i] = crc32(found) or 1
        else:
            others.append(i)
    if others:
        _together(tensors, others, each)
    return wide(struct.pack(f"<{len(each)}I", *each)), each


def _together(tensors: Sequence[Any], which: Sequence[int], each: list[int]) -> None:
    """Digests of tensors that torch has to read, a device's with one copy for all of a kind."""
    import torch

    by_dtype: dict[Any, list[tuple[int, Any]]] = {}
    with torch.no_grad():
        for i in which:
            if (view := sampled(tensors[i])).numel():
                by_dtype.setdefault((view.dtype, view.device), []).append((i, view))
        for group in by_dtype.values():
            blob = to_bytes(torch.cat([view for _, view in group]) if len(group) > 1 else group[0][1].resolve_neg())
            width = len(blob) // max(1, sum(view.numel() for _, view in group))
            at = 0
            for i, view in group:
                end = at + view.numel() * width
                each[i] = crc32(blob[at:end]) or 1
                at = end


def full(tensor: Any) -> int:
    """Every bit of a CPU tensor (about 0.6 ms a MB); 0 where it is not plain, not dense, not on the CPU or without memory."""
    import torch

    if tensor is None or not plain(tensor) or _span(tensor) != tensor.numel() or not has_memory(tensor):
        return 0
    with torch.no_grad():
        return crc32(to_bytes(_view_of(tensor, tensor.numel(), 1, tensor.storage_offset()))) or 1


class Rotation:
    """Full coverage in slices: step s hashes slice s modulo the number of slices, the same on every rank."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.slices: list[list[tuple[int, int, int]]] = [[]]  # (tensor, first element, elements)
        room = SLICE_BYTES
        for i, tensor in enumerate(tensors):
            if not plain(tensor) or tensor.device.type != "cpu" or _span(tensor) != tensor.numel():
                continue
            size, start = tensor.element_size(), 0
            while start < tensor.numel():
                if room < size:
                    self.slices.append([])
                    room = SLICE_BYTES
                num = min(tensor.numel() - start, room // size)
                self.slices[-1].append((i, start, num))
                start, room = start + num, room - num * size
        self.num_bytes = sum(t.numel() * t.element_size() for t in tensors if plain(t))

    def digest(self, tensors: Sequence[Any], step: int) -> int:
        import torch

        chosen = self.slices[step % len(self.slices)]
        value = 0
        with torch.no_grad():
            for i, start, num in chosen:
                tensor = tensors[i]
                if not plain(tensor) or not tensor.is_cpu or start + num > tensor.numel():  # another tensor by now: `p.data = ...`, or moved
                    continue
                if address := _address(tensor, tensor.numel()):
                    size = tensor.element_size()
                    value = crc32(_view(address + start * size, num * size, _READ), value)
                else:
                    value = crc32(to_bytes(_view_of(tensor, num, 1, tensor.storage_offset() + start)), value)
        return (value << 32 | len(chosen)) if chosen else 0


def of_batch(item: Any, depth: int = 0) -> list[Any]:
    """The plain tensors of a batch, in order: tensors, sequences, mappings and objects with __dict__ (bounded)."""
    if isinstance(item, tensor_kind()):
        return [item] if plain(item) else []
    if depth > 3:
        return []
    parts: list[Any] = []
    if isinstance(item, dict):
        parts = list(item.values())
    elif isinstance(item, (list, tuple)):
        parts = list(item)
    elif hasattr(item, "__dict__"):
        parts = list(vars(item).values())
    found: list[Any] = []
    for part in parts[:32]:
        found.extend(of_batch(part, depth + 1))
    return found


def of_rows(tensor: Any, max_rows: int = 512, width: int = 32) -> list[int]:
    """A digest a sample of a batch (first dimension); `width` evenly spaced elements of each."""
    import torch

    with torch.no_grad():
        if not has_memory(tensor):
            return []
        rows = tensor.detach()[:max_rows]
        rows = rows.reshape(rows.shape[0], -1)
        step = max(1, rows.shape[1] // width)
        flat = rows[:, ::step].contiguous()
        blob = to_bytes(flat.reshape(-1))
        size = len(blob) // max(1, rows.shape[0])
        return [crc32(blob[i * size : (i + 1) * size]) for i in range(rows.shape[0])]
