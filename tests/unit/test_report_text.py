"""Foreign text is made harmless, numbers readable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from harness.report.text import clean, compress, duration, one_line, ranks_phrase, rate, share, size


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b[2J\x1b[Hgone", "gone"),
        ("a\x00b\x08c\x7f", "abc"),
        ("10%\r50%\r100%", "100%"),
        ("one\r\ntwo\r\n", "one\ntwo\n"),
        ("tab\tstays", "tab\tstays"),
        ("\x9b31mred", "red"),
        ("ab\u202ecd\u2066", "abcd"),
        ("caf\u00e9 \u4f60", "caf\u00e9 \u4f60"),
        ("lone \ud800", "lone "),
    ],
)
def test_clean(raw: str, shown: str) -> None:
    assert clean(raw) == shown


@given(st.text(st.characters(categories=None)))
@limits(max_examples=300)
def test_nothing_that_steers_a_terminal_survives(raw: str) -> None:
    shown = clean(raw)
    assert all(c in "\n\t" or (ord(c) >= 32 and not 0x7F <= ord(c) <= 0x9F) for c in shown)
    shown.encode("utf-8")
    assert "\n" not in one_line(raw)


def test_compress() -> None:
    assert compress([0, 2, 3, 4, 5, 6, 7]) == "0,2-7"
    assert compress([3, 3, 1]) == "1,3"
    assert ranks_phrase([]) == ""
    assert ranks_phrase([1]) == "rank 1"
    assert ranks_phrase([1, 0]) == "ranks 0-1"


def test_numbers() -> None:
    assert (size(None), size(512), size(300 * 2**20), size(1.5 * 2**30)) == ("-", "512 B", "300 MiB", "1.5 GiB")
    assert (duration(None), duration(0.0000005), duration(0.0123), duration(0.5), duration(3), duration(600)) == (
        "-", "0 us", "12.3 ms", "500 ms", "3.0 s", "10 min 0 s",
    )  # fmt: skip
    assert (rate(None), rate(3200), rate(1.234)) == ("-", "3,200", "1.23")
    assert (share(None), share(0.25), share(0.012), share(0.0)) == ("-", "25 %", "1.2 %", "0 %")
