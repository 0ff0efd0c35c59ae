"""The loop over a generator that a stack stands in, read from the source."""

from __future__ import annotations

import linecache
from pathlib import Path

from harness.probe import generators, syntax

SOURCE = """\
def reduced(loader):
    for batch in loader:
        reduce(batch)
        yield batch

def chained(loader):
    yield from reduced(loader)

def panel(loader):
    for batch in tqdm(chained(loader)):
        if full(batch):
            break
        for row in batch:
            if not row:
                break
    for batch in list(reduced(loader)):
        use(batch)
    drawn = reduced(loader)
    while True:
        batch = next(drawn)
        if not batch:
            return
    return [b for b in reduced(loader)]
"""


def told(tmp_path: Path, *lines: int) -> tuple[int, list[int], str] | None:
    file = tmp_path / "train.py"
    file.write_text(SOURCE)
    linecache.clearcache()
    syntax.tree.cache_clear()
    found = generators.consumer([(str(file), line, f"f{line}") for line in lines])
    return (found["loop"]["line"], [e["line"] for e in found["exits"]], found["name"]) if found is not None else None


def test_the_loop_that_draws_and_its_ways_out(tmp_path: Path) -> None:
    assert told(tmp_path, 3, 7, 10) == (10, [11], "f7")
    assert told(tmp_path, 3, 20) == (19, [21], "f3")


def test_what_is_drawn_whole_or_by_no_loop_is_none(tmp_path: Path) -> None:
    assert told(tmp_path, 3, 16) is None
    assert told(tmp_path, 3, 23, 10) is None  # a comprehension draws to the end
    assert told(tmp_path, 11, 3) is None
    assert told(tmp_path, 3) is None


def test_a_statement_of_a_generator(tmp_path: Path) -> None:
    told(tmp_path)
    file = str(tmp_path / "train.py")
    assert [generators.holds((file, line, "f")) for line in (3, 11)] == [True, False]
