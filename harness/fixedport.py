"""A port that the script itself fixes, and that somebody listens on already: said before a process is started, not after a wait.

Only where it is certain: one assignment of a constant to os.environ["MASTER_PORT"] in the file, under no condition.
"""

from __future__ import annotations

import ast
import errno
import socket
from pathlib import Path

from harness.errors import UsageError


def check_fixed_port(script: Path) -> None:
    """UsageError where the script's own MASTER_PORT is taken on this host. A source that cannot be read is for others to refuse."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    assigned = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and any(_is_port(t) for t in n.targets)]
    if len(assigned) != 1 or not any(assigned[0] is n for n in _unconditional(tree.body)):
        return
    value = assigned[0].value
    port = str(value.value) if isinstance(value, ast.Constant) else ""
    if port.isdecimal() and 0 < int(port) < 65536 and _taken(int(port)):
        raise UsageError(
            f"{script.name}:{assigned[0].lineno} sets MASTER_PORT to {port}, and another process listens on that port of this host; "
            "take another one, or leave the line out: the launcher chooses a free port"
        )


def _is_port(target: ast.expr) -> bool:
    return (
        isinstance(target, ast.Subscript)
        and isinstance(target.slice, ast.Constant)
        and target.slice.value == "MASTER_PORT"
        and ast.unparse(target.value) in ("os.environ", "environ")
    )


def _unconditional(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements that are executed whenever their function is; what stands under `if __name__ == "__main__"` too."""
    found: list[ast.stmt] = []
    for one in body:
        found.append(one)
        main = isinstance(one, ast.If) and "__name__" in ast.unparse(one.test)
        if main or isinstance(one, (ast.FunctionDef, ast.ClassDef, ast.With)):
            found += _unconditional(one.body)  # type: ignore[attr-defined]
    return found


def _taken(port: int) -> bool:
    """Whether somebody listens there: with SO_REUSEADDR, as torch's store binds, a connection that is only dying does not count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
