"""Text that others wrote, made harmless, and numbers, made readable.

A script's output, a source line, a file name, a message: each may hold escape codes, carriage returns or direction marks that repaint the
terminal, or a line that looks like a verdict. Everything foreign goes through `clean` or `one_line`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# CSI and OSC sequences whole, so that "\x1b[31mred" becomes "red" and not "[31mred"; then every other control character.
_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?|\x9b[0-?]*[ -/]*[@-~]")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
MAX_LINE = 2000


def clean(text: str) -> str:
    """Without control characters but newline and tab; what a carriage return overwrote is gone, as on a terminal."""
    if "\r" in text:
        text = "\n".join(_last_painted(line) for line in text.replace("\r\n", "\n").split("\n"))
    return _CONTROL.sub("", _SEQUENCE.sub("", text))


def _last_painted(line: str) -> str:
    return next((part for part in reversed(line.split("\r")) if part), "")


def one_line(text: str, most: int = MAX_LINE) -> str:
    line = " ".join(clean(text).split())
    return line if len(line) <= most else line[: most - 3] + "..."


def gist(text: str, most: int = 300) -> str:
    """A traceback in one line: what it begins with, and the exception at its end."""
    lines = [line for line in clean(text).splitlines() if line.strip()]
    return one_line(": ".join(dict.fromkeys([lines[0], lines[-1]])), most) if lines else ""


def source_line(text: str) -> str:
    """A line of code: tabs become blanks, indentation goes."""
    return one_line(clean(text).expandtabs(4).strip(), 200)


def compress(numbers: Iterable[int]) -> str:
    """0,2-7 for {0,2,3,4,5,6,7}."""
    ordered = sorted(set(numbers))
    spans: list[list[int]] = []
    for number in ordered:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def ranks_phrase(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    return f"rank{'s' * (len(set(ranks)) > 1)} {compress(ranks)}"


# ---- numbers: `None` is "-", because nothing was measured


def size(num_bytes: float | None) -> str:
    if num_bytes is None:
        return "-"
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit in ("B", "KiB") or value >= 100 else f"{value:.1f} {unit}"


def duration(value_s: float | None) -> str:
    if value_s is None:
        return "-"
    if value_s < 0.001:
        return f"{value_s * 1e6:.0f} us"
    if value_s < 1:
        return f"{value_s * 1e3:.1f} ms" if value_s < 0.1 else f"{value_s * 1e3:.0f} ms"
    if value_s < 120:
        return f"{value_s:.1f} s"
    return f"{int(value_s // 60)} min {int(value_s % 60)} s"


def rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %" if value >= 0.1 or value == 0 else f"{100 * value:.1f} %"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def count(num: int, word: str) -> str:
    return f"{num} {word}{'' if num == 1 else 'es' if word.endswith('s') else 's'}"
