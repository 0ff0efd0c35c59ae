"""Looks at a data folder before any process is started: is it there, is it whole, does a sample of its files begin as images do?

Decoding is the script's own business; here the first bytes of a file are read and, for a scenario, its end, of 10,000 files at most.
"""

from __future__ import annotations

import os
from pathlib import Path

from harness.errors import UsageError

CIFAR = "cifar-10-batches-py"
CIFAR_FILES = ("batches.meta", "data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
SUFFIXES = {".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".webp"}
MAGIC = {
    ".jpg": (b"\xff\xd8\xff",),
    ".jpeg": (b"\xff\xd8\xff",),
    ".png": (b"\x89PNG\r\n\x1a\n",),
    ".bmp": (b"BM",),
    ".webp": (b"RIFF",),
    ".ppm": (b"P3", b"P6"),
}
END = {".jpg": b"\xff\xd9", ".jpeg": b"\xff\xd9", ".png": b"IEND"}  # what a half-copied image lacks; cameras write more behind it
TAIL_BYTES = 64 << 10
MAX_SAMPLE = 10_000
FORMS = f"torchvision's {CIFAR}, or images as train/<class>/* and test/<class>/*"


def check_data_root(root: Path, *, strict: bool) -> None:
    """Raise UsageError where the folder cannot be what the script wants. `strict`: it must be one of the two forms of the scenarios."""
    if not os.path.exists(root):  # noqa: PTH110  (never raises)
        raise UsageError(f"data folder {root} does not exist; give {FORMS}" if strict else f"data folder {root} does not exist")
    if not root.is_dir():
        raise UsageError(f"data folder {root} is a file; give the folder that holds it")
    try:
        entries = sorted(p.name for p in root.iterdir())
        if not entries:
            raise UsageError(f"data folder {root} is empty; it must hold {FORMS}" if strict else f"data folder {root} is empty")
        _check_form(root, entries, strict)
    except OSError as error:  # the folder itself, or one below it
        raise UsageError(f"data folder {error.filename or root} cannot be read: {(error.strerror or str(error)).lower()}; chmod it") from None


def _check_form(root: Path, entries: list[str], strict: bool) -> None:
    if root.name == CIFAR:
        _check_cifar(root)
    elif CIFAR in entries:
        _check_cifar(root / CIFAR)
    elif "train" in entries or "test" in entries:
        _check_tree(root, strict)
    elif strict:
        raise UsageError(f"data folder {root} holds {_some(entries)}, but neither {CIFAR} nor train and test; give {FORMS}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _check_cifar(folder: Path) -> None:
    missing = [name for name in CIFAR_FILES if not (folder / name).is_file()]
    if missing:
        raise UsageError(
            f"{folder} is half a copy: {_some(missing)} missing; copy it again, or fetch it with -- --data-root DIR --download"
        )
    for name in CIFAR_FILES:
        head = _head(folder / name)
        if not head.startswith(b"\x80"):  # every pickle of protocol 2 or later
            raise UsageError(
                f"{folder / name} is {'empty' if not head else 'no pickle'}, so this copy of CIFAR-10 is broken; copy it again"
            )


def _check_tree(root: Path, strict: bool) -> None:
    classes = {part: _classes(root / part) for part in ("train", "test") if (root / part).is_dir()}
    for part in ("train", "test"):
        if strict and part not in classes:
            raise UsageError(f"data folder {root} is half a tree: it has no {part} folder; copy it again")
        if strict and not classes[part]:
            raise UsageError(f"data folder {root / part} has no class folders; it must hold {part}/<class>/*")
    if strict and set(classes["train"]) != set(classes["test"]):
        odd = sorted(set(classes["train"]) ^ set(classes["test"]))
        part = "train" if odd[0] in classes["train"] else "test"
        raise UsageError(f"data folder {root} is half a tree: class {odd[0]} is only in {part}; copy it again")
    for part, names in classes.items():
        for name in names:
            if not any((root / part / name).iterdir()):
                raise UsageError(f"{root / part / name} is empty, so {root} is half a tree; copy it again")
    _check_images([root / part / name for part, names in classes.items() for name in names], strict)


def _classes(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir())


def _check_images(folders: list[Path], strict: bool) -> None:
    images: list[Path] = []
    for folder in folders:
        found = [folder / name for name in sorted(os.listdir(folder)) if os.path.splitext(name)[1].lower() in SUFFIXES]  # noqa: PTH122, PTH208
        if strict and not found:
            raise UsageError(f"{folder} holds no images ({', '.join(sorted(SUFFIXES))}); copy it again")
        images += found
    stride = -(-len(images) // MAX_SAMPLE) or 1
    for path in images[::stride]:
        head = _head(path)
        if not head.startswith(MAGIC[path.suffix.lower()]):
            kind = path.suffix.lower().lstrip(".")
            raise UsageError(f"{path} is {'empty' if not head else f'no {kind} image'}; copy it again or remove it")
        if strict and END.get(path.suffix.lower(), b"") not in _head(path, tail=TAIL_BYTES):
            raise UsageError(f"{path} is cut short: its end is missing; copy it again or remove it")


def _head(path: Path, tail: int = 0) -> bytes:
    """The first 16 bytes, or the last `tail`."""
    try:
        with path.open("rb") as file:
            if tail:
                file.seek(-min(tail, os.fstat(file.fileno()).st_size), os.SEEK_END)
            return file.read(tail or 16)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
