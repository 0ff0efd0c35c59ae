"""What a warm server may import before a script runs, read from the script's source; and what forbids it to serve that script.

Only modules of the allow-list are ever preloaded, never the user's own. Reading follows the user's own modules beside the script, because
`import torchvision` often stands in `model.py`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

ALLOWED = ("numpy", "torch", "torchvision")
DYNAMO = "torch._dynamo"  # torch imports it by itself when one of these is used: 2 to 4 s, as much as torch itself
USES_DYNAMO = re.compile(rb"\b(optim|compile|_dynamo|DistributedDataParallel|fully_shard|fsdp|checkpoint)\b")
MAX_FILES = 64
# Read when torch or numpy is imported; a script that sets one before its import would not get it from a server that has them already.
IMPORT_TIME = re.compile(
    r"^(OMP_|MKL_|KMP_|GOMP_|OPENBLAS_|BLIS_|NUMEXPR_|VECLIB_|LD_|PYTHON|TORCH_LOGS|TORCH_TRACE|TORCH_SHOW|TORCH_DISABLE|TORCHDYNAMO_|"
    r"TORCHINDUCTOR_|TORCH_COMPILE|TORCH_DEVICE_BACKEND|TORCH_FORCE|ATEN_|PYTORCH_NVML|PYTORCH_JIT|NPY_|NUMPY_)"
)

AT_LOAD = re.compile(r"^(OMP_|MKL_|KMP_|GOMP_|OPENBLAS_|BLIS_)")  # of these: by libraries that `import torch` loads, numpy's among them


def modules(script: Path) -> tuple[str, ...]:
    """Allow-listed modules that the script and its neighbours import, in the order to import them."""
    found: set[str] = set()
    dynamo = False
    for source in _sources(script):
        found |= {name for name in _imported(source) if name in ALLOWED}
        dynamo = dynamo or USES_DYNAMO.search(source) is not None
    names = [name for name in ("torch", "numpy", "torchvision") if name in found]
    return (*names, DYNAMO) if dynamo and "torch" in found else tuple(names)


def obstacle(script: Path) -> str:
    """Why no preloaded interpreter can run this script as a fresh one would; empty where none is seen."""
    if not script.is_file():
        return f"{script} is not a file"
    source = _read(script)
    tree = _parse(source)
    loaded = _torch_is_there(tree) if tree else 0
    for node in _nodes(source):
        if (name := _sets(node)) and IMPORT_TIME.match(name):
            if AT_LOAD.match(name) and 0 < loaded < getattr(node, "lineno", 0):
                continue  # too late for this process in a fresh interpreter as well: it is meant for workers that the script starts
            return f"{script.name} sets {name}, which is read when torch is imported"
    return ""


def _torch_is_there(tree: ast.Module) -> int:
    """The line from which on torch is imported: of the first such statement that stands at the top level; 0 where there is none."""
    for node in tree.body:
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.partition(".")[0] == "torch" for name in names) and not getattr(node, "level", 0):
            return node.end_lineno or node.lineno
    return 0


def _sources(script: Path) -> Iterator[bytes]:
    """The script, then the modules beside it that it reaches by import."""
    seen, queue = {script}, [script]
    while queue and len(seen) <= MAX_FILES:
        source = _read(queue.pop(0))
        yield source
        for file in (file for name in _imported(source, whole=True) for file in _neighbours(script.parent, name)):
            if file not in seen:
                seen.add(file)
                queue.append(file)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


@lru_cache(maxsize=8)  # the same script is asked about four times for one run
def _parse(source: bytes) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None


@lru_cache(maxsize=8)
def _nodes(source: bytes) -> tuple[ast.AST, ...]:
    """All nodes that can import a module or set a variable."""
    tree = _parse(source)
    return tuple(n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom, ast.Subscript, ast.Call))) if tree else ()


def _imported(source: bytes, whole: bool = False) -> set[str]:
    """Names of imported modules: top level only, or dotted (`whole`)."""
    names: set[str] = set()
    for node in _nodes(source):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names.update({base, *(f"{base}.{alias.name}".strip(".") for alias in node.names)} if whole else {base})
    return names if whole else {name.partition(".")[0] for name in names}


def _neighbours(folder: Path, name: str) -> Iterator[Path]:
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        base = folder.joinpath(*parts[:depth])
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                yield file


def _sets(node: ast.AST) -> str:
    """The name of an environment variable that this node sets: os.environ[..] = .., os.environ.setdefault(..), os.putenv(..)."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and _is_environ(node.value):
        return _text(node.slice)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        on_environ = node.func.attr == "setdefault" and _is_environ(node.func.value)
        return _text(node.args[0]) if on_environ or node.func.attr == "putenv" else ""
    return ""


def _is_environ(node: ast.AST) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (isinstance(node, ast.Name) and node.id == "environ")


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
