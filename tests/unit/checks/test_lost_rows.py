"""Rows that are not there: what a full disk did not take, and what a rank that writes on has not written yet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from builder import row

from harness import record
from harness.probe import protocol
from harness.record import Event, load_recordings


def written(tmp_path: Path, *, rows: int, page_step: int, role: str = "main", end: bool = False) -> str:
    events = [{"k": "start", "t": 1, "s": 0, "pid": 100, "rank": 0, "role": role}, *([{"k": "end", "t": 9, "s": rows, "steps": rows}] if end else [])]
    (tmp_path / "0-100-5.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    (tmp_path / "0-100-5.rows").write_bytes(protocol.ROWS_MAGIC + b"".join(row(s) for s in range(rows)))
    page = protocol.STATUS.pack(2, 100, 1, 7, page_step, 1, b"train", b"", 0)
    (tmp_path / "0-100-5.status").write_bytes(page + b"".ljust(protocol.STATUS_SITE_BYTES, b"\0"))
    (recording,) = load_recordings(tmp_path)
    return recording.damage


@pytest.mark.parametrize(
    ("told", "damage"),
    [
        ({"rows": 16, "page_step": 40}, "24 step rows are missing"),
        ({"rows": 40, "page_step": 40}, ""),
        ({"rows": 40, "page_step": 39}, ""),  # a page is written ten times a second
        ({"rows": 16, "page_step": 40, "end": True}, ""),  # what the process said last counts
        ({"rows": 0, "page_step": 3, "role": "child"}, ""),  # a fork's page may count its parent's steps
    ],
)
def test_the_page_tells_what_the_disk_did_not_take(tmp_path: Path, told: dict[str, int], damage: str) -> None:
    assert written(tmp_path, **told) == damage  # type: ignore[arg-type]


@pytest.mark.parametrize("ends", [False, True])
def test_a_rank_that_writes_on_while_it_is_read_lacks_no_event_of_a_row_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """Without its end the rows are those from before; an end that was there meanwhile counts all of them."""
    written(tmp_path, rows=4, page_step=4)
    parse = record.parse_events

    def slowly(blob: bytes, sites: dict[object, object]) -> Iterator[Event]:
        with (tmp_path / "0-100-5.rows").open("ab") as f:
            f.write(row(4))
        yield from parse(blob, sites)
        if ends:
            yield Event("end", 9, 5, {"steps": 5})

    monkeypatch.setattr(record, "parse_events", slowly)
    (found,) = load_recordings(tmp_path)
    assert (found.num_rows, found.damage) == ((5, "") if ends else (4, ""))
