"""`zip(*parts)` behind a gather: found where it alone reads the parts, and nowhere near it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.probe import zippedparts


def found(tmp_path: Path, body: str) -> int | None:
    path = tmp_path / "work.py"
    path.write_text("def f(mine):\n    parts = [None] * 2\n    dist.all_gather_object(parts, mine)\n" + body)
    site = zippedparts.zipped_after((str(path), 3, "f"), "all_gather_object")
    return site and site[1]


@pytest.mark.parametrize("body", ["    return list(chain.from_iterable(zip(*parts)))\n", "    return [p for row in zip(*parts) for p in row]\n"])
def test_zip_alone_reads_the_parts(tmp_path: Path, body: str) -> None:
    assert found(tmp_path, body) == 4


@pytest.mark.parametrize(
    "body",
    [
        "    return list(chain.from_iterable(zip_longest(*parts)))\n",
        "    return list(chain(*parts))\n",
        "    return list(zip(*parts, strict=True))\n",
        "    out = list(zip(*parts))\n    return out + [p[len(out):] for p in parts]\n",
        "    rounds = list(zip(*parts))\n    return rounds, mine[len(rounds):]\n",  # the tail waits for the next round
        "    rounds = list(zip(*parts))\n    del mine[: len(rounds)]\n    return rounds\n",
        "    parts = pad(parts)\n    return list(zip(*parts))\n",
        "    return list(zip(names, *parts))\n",
    ],
)
def test_others(tmp_path: Path, body: str) -> None:
    assert found(tmp_path, body) is None


def test_a_strict_zip_is_another_one(tmp_path: Path) -> None:
    path = tmp_path / "work.py"
    path.write_text("def f(mine):\n    parts = [None] * 2\n    dist.all_gather_object(parts, mine)\n    return list(zip(*parts, strict=True))\n")
    assert zippedparts.zipped_after((str(path), 3, "f"), "all_gather_object", strict=True) == (str(path), 4, "f")
    other = tmp_path / "other.py"
    other.write_text(path.read_text().replace("strict=True", "strict=some"))
    assert zippedparts.zipped_after((str(other), 3, "f"), "all_gather_object", strict=True) is None
