"""Suppression by comment and by flag; one that silences nothing is reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
from controller_samples import FINDING, OUTCOMES

from harness import suppress
from harness.model import OutcomeKind, Where
from harness.suppress import Comment, Silenced

SOURCE = """\
import torch

for x, y in loader:  # harness: ignore[DAT101]
    pass
# harness: ignore[SYN101, forward-bypasses-ddp]
# another remark
loss = ddp.module(x)
"""


def at(line: int, code: str = "DAT101", text: str = "", file: str = "/home/u/project/train.py") -> object:
    return replace(FINDING, code=code, where=Where(file, line, "main", text))


def apply(*findings: object, comments: tuple[Comment, ...] = (), ignored: dict[str, tuple[str, ...]] | None = None) -> Silenced:
    return suppress.apply(OUTCOMES, findings, "./train.py", comments, ignored or {})  # type: ignore[arg-type]


def test_comments_speak_of_their_line_or_of_the_next_code() -> None:
    assert suppress.comments_in(SOURCE) == (Comment(3, ("DAT101",)), Comment(7, ("SYN101", "forward-bypasses-ddp")))


@pytest.mark.parametrize("word", ["DAT101", "dat101", "DAT", "sampler-epoch-not-set"])
def test_a_comment_silences_by_code_family_and_name(word: str) -> None:
    result = apply(at(3), comments=(Comment(3, (word,)),))
    assert (len(result.findings), len(result.silenced), result.unused) == (0, 1, ())


def test_another_line_file_or_code_is_not_silenced() -> None:
    for finding in (at(4), at(3, file="/elsewhere/model.py"), at(3, code="DAT102")):
        result = apply(finding, comments=(Comment(3, ("DAT101",)),))
        assert result.findings == (finding,)
        assert result.unused == ("train.py:3 ignore[DAT101]",)


def test_a_comment_in_another_file_comes_with_the_finding() -> None:
    result = apply(at(9, text="for x in loader:  # harness: ignore[DAT101]", file="/elsewhere/data.py"))
    assert (result.findings, len(result.silenced)) == ((), 1)


def test_ignore_takes_the_finding_and_deselects_the_check() -> None:
    result = apply(at(3), ignored={"DAT": ("DAT101", "DAT102"), "MEM": ("MEM103",)})
    assert result.findings == ()
    assert result.unused == ("--ignore MEM",)
    assert {o.code for o in result.outcomes if o.kind is OutcomeKind.DESELECTED} == {"DAT101", "DAT102", "MEM103", "EVL104"}
