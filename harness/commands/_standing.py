"""How `harness stacks` tells where the ranks stand."""

from __future__ import annotations

from collections.abc import Sequence

from harness.frames import is_ours, is_users
from harness.model import Where
from harness.report.text import clean, one_line, ranks_phrase
from harness.watch.standing import Standing


def sentence(one: Standing) -> str:
    """What a rank does, in words."""
    if not one.alive:
        return "has ended"
    place = f" at {shown_site(one.site)}" if one.site else ""
    own = f"is in its own code{_innermost(one)}, {one.age_s:.1f} s after its last call that can wait"
    doing = f"has been in {one.op}{place} for {one.age_s:.1f} s" if one.op else own
    return one_line(f"{doing}, step {one.step}")


def _innermost(one: Standing) -> str:
    """The user's innermost line in the main thread."""
    frame = next((f for f in reversed(one.threads.get("MainThread", ())) if is_users(f.file)), None)
    return f" at {frame.file.rpartition('/')[2]}:{frame.line}" if frame is not None else ""


def shown_site(site: str) -> str:
    """`train.py:88` of "/path/train.py:88:main"."""
    file, _, rest = site.rpartition(":")
    return file.rpartition("/")[2] if rest else site


def text(found: Sequence[Standing], cwd: str) -> str:
    if not found:
        return "no rank has shown itself yet"
    lines = [f"{ranks_phrase(ranks)}: {doing}" for doing, ranks in _grouped(found)]
    for one in found:
        if one.alive:
            lines += ["", f"rank {one.rank} (pid {one.pid}), {sentence(one)}", *_threads(one, cwd)]
    return "\n".join(lines)


def _grouped(found: Sequence[Standing]) -> list[tuple[str, list[int]]]:
    """Who waits where, ranks at one place together."""
    groups: dict[str, list[int]] = {}
    for one in found:
        doing = "has ended" if not one.alive else f"in {one.op} at {shown_site(one.site)}" if one.op else f"in its own code{_innermost(one)}"
        groups.setdefault(one_line(doing), []).append(one.rank)
    return sorted(groups.items(), key=lambda item: item[1])


def _threads(one: Standing, cwd: str) -> list[str]:
    if not one.threads:
        return ["  no answer: native code holds the interpreter's lock, or torch is not imported yet"]
    lines = []
    for name, frames in sorted(one.threads.items(), key=lambda item: item[0] != "MainThread"):
        lines.append(f"  {one_line(clean(name), 60)}, innermost last:")
        lines += [f"    {_frame(frame, cwd)}" for frame in frames if not is_ours(frame.file)]
    return lines


def _frame(frame: Where, cwd: str) -> str:
    file = frame.file.removeprefix(f"{cwd}/") if cwd else frame.file
    return one_line(f"{file}:{frame.line} in {frame.function}" + (f": {frame.text}" if frame.text else ""), 200)
