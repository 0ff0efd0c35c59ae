"""A count over a share that is divided by the length of the whole set, as the source shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.probe import overwhole

SOURCE = """
loader = DataLoader({given}, 16, sampler=sampler)
def epoch():
    hits = 0
    for i, (x, y) in enumerate(loader):
        hits += (net(x).argmax(1) == y).sum()
{behind}
"""


def look(folder: Path, *behind: str, given: str = "train_set") -> int:
    file = folder / f"train{len(list(folder.iterdir()))}.py"  # what was read of a file is kept
    file.write_text(SOURCE.format(given=given, behind="\n".join(f"    {line}" for line in behind)))
    found = overwhole.divided_at((str(file), 5, "epoch"), (str(file), 2, ""))
    return found[1] if found is not None else 0


@pytest.mark.parametrize("number", ["hits / len(train_set)", "100 * hits.item() / len(train_set)", "float(hits) / len(loader.dataset)"])
def test_divided_by_the_whole(number: str, tmp_path: Path) -> None:
    assert look(tmp_path, "print('x')", f"print({number})") == 8
    assert look(tmp_path, f"acc = {number}", "print(acc)") == 7


@pytest.mark.parametrize(
    "behind",
    [
        ("dist.all_reduce(hits)", "acc = hits / len(train_set)"),
        ("hits = total(hits)", "acc = hits / len(train_set)"),
        ("acc = hits * world / len(train_set)",),
        ("acc = hits / len(sampler)",),
        ("acc = hits / seen",),
        ("acc = hits / len(other_set)",),
        ("mean = loss / len(train_set)",),
    ],
)
def test_what_is_no_fault(behind: tuple[str, ...], tmp_path: Path) -> None:
    assert look(tmp_path, *behind) == 0


def test_no_source() -> None:
    assert overwhole.divided_at(("", 0, ""), ("", 0, "")) is None
    assert overwhole.told(("", 0, ""), None) is None
