"""What decides whether a statement is reached, read from the source."""

from __future__ import annotations

import linecache
from pathlib import Path

from harness.probe import conditions, syntax

SOURCE = """\
def validate(model, files):
    if not files:
        return None
    total = 0
    for f in files:
        if f is None:
            continue
        total += 1
    reduce(total)
    for key in sorted(total):
        reduce(key)

def save(rank):
    if rank == 0:
        reduce(1)
    return 2

def main():
    for epoch in range(3):
        if epoch == 1:
            break
        validate(None, [])
    for epoch in range(3):
        validate(None, [])

if __name__ == "__main__":
    main()
"""


def ways(tmp_path: Path, *lines: int) -> tuple[list[tuple[int, str]], int | None]:
    file = tmp_path / "train.py"
    file.write_text(SOURCE)
    linecache.clearcache()
    syntax.tree.cache_clear()
    told = conditions.before([(str(file), line, "f") for line in lines])
    return [(w["site"]["line"], w["kind"]) for w in told["ways"]], told["loop"] and told["loop"]["line"]


def test_an_early_return_and_nothing_else(tmp_path: Path) -> None:
    assert ways(tmp_path, 9, 24, 27) == ([(2, "exit")], None)


def test_the_end_of_a_loop_that_holds_the_call_counts_too(tmp_path: Path) -> None:
    assert ways(tmp_path, 9, 22, 27) == ([(2, "exit"), (20, "exit")], None)


def test_a_branch_around_it_and_the_loop_that_it_stands_in(tmp_path: Path) -> None:
    assert ways(tmp_path, 15) == ([(14, "branch")], None)
    assert ways(tmp_path, 11)[1] == 10


def test_a_file_without_source_tells_nothing(tmp_path: Path) -> None:
    assert conditions.before([(str(tmp_path / "none.py"), 3, "f")]) == {"ways": [], "loop": None}
