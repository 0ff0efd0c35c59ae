"""OUT102-OUT106 on small runs."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from builder import event, findings, recording, row, run

from harness.checks.engine import judge
from harness.checks.out.cleared import FolderClearedBySeveralRanks
from harness.checks.out.every_rank_prints import EveryRankPrints
from harness.checks.out.local_loss import PrintsLocalLoss
from harness.checks.out.rank_as_text import RankAsText
from harness.checks.out.same_file import EveryRankWritesOutput
from harness.checks.out.torn_events import EventFileHalfWritten
from harness.checks.out.two_writers import TwoWritersOneLogDir
from harness.model import OutcomeKind, Severity
from harness.probe import eventfiles
from harness.record import Event, Run

CHECKS = (FolderClearedBySeveralRanks, EveryRankPrints, PrintsLocalLoss, EveryRankWritesOutput, EventFileHalfWritten, TwoWritersOneLogDir)


def two(*by_rank: list[Event], **kwargs: object) -> Run:
    return run([recording(events, rank=rank) for rank, events in enumerate(by_rank)], **kwargs)


def prints(*texts: str, line: int = 10) -> list[Event]:
    return [event("print", line=line, text=text, stream=1) for text in texts]


@pytest.mark.parametrize("check", CHECKS)
def test_silent_on_empty_and_single(check: type) -> None:
    assert findings(RankAsText, run([recording()])) == []
    assert findings(check, two([], [])) == []
    alone = [event("print", line=3, text="a", stream=1), event("open"), event("mkdir")]
    assert findings(RankAsText, run([recording(alone)])) == []


def test_truncated_events_never_crash() -> None:
    torn = [event(kind, line=3) for kind in ("print", "log", "open", "mkdir", "remove", "rename", "event_file", "sleep")] + [
        event("open", path=None, mode=3)
    ]
    outcomes, _ = judge(two(torn, torn), select=("OUT10",))
    assert [o for o in outcomes if o.kind is OutcomeKind.CRASHED] == []


def test_same_line_on_every_rank_twice_is_a_warning() -> None:
    found = findings(
        EveryRankPrints, two(prints("epoch 0: loss 0.51", "epoch 1: loss 0.40"), prints("epoch 0: loss 0.55", "epoch 1: loss 0.44"))
    )
    assert [(f.code, f.severity, f.ranks) for f in found] == [("OUT102", Severity.WARNING, (0, 1))]
    assert found[0].where is not None and found[0].where.line == 10
    assert "2 times" in found[0].message


def test_same_line_once_is_advice() -> None:
    found = findings(EveryRankPrints, two(prints("ready"), prints("ready")))
    assert [f.severity for f in found] == [Severity.ADVICE]


@pytest.mark.parametrize(("at", "severity"), [((0, 0), Severity.ADVICE), ((0, 3), Severity.WARNING)])
def test_a_listing_between_two_steps_is_advice(at: tuple[int, int], severity: Severity) -> None:
    """A configurator's "Overriding: lr = 3" on every rank; the same statement at a later step is a log."""
    told = [event("print", line=10, s=s, text=f"Overriding: {name}", stream=1) for s, name in zip(at, ("lr = 3", "lr = 4"), strict=True)]
    found = findings(EveryRankPrints, run([recording(told, [row(s) for s in range(4)], rank=rank) for rank in range(2)]))
    assert [f.severity for f in found] == [severity]


@pytest.mark.parametrize(
    ("zero", "one"),
    [
        (["[0] epoch 0", "[0] epoch 1"], ["[1] epoch 0", "[1] epoch 1"]),
        (["rank 0 epoch 0", "rank 0 epoch 1"], ["rank 1 epoch 0", "rank 1 epoch 1"]),
        (["4711: step 1", "4711: step 2"], ["4712: step 1", "4712: step 2"]),
        (["epoch 0", "epoch 1"], []),
        (["train done", "eval done"], ["evil twin", "other"]),
    ],
)
def test_tagged_lines_and_rank_0_lines_are_healthy(zero: list[str], one: list[str]) -> None:
    assert findings(EveryRankPrints, two(prints(*zero), prints(*one))) == []


def test_log_counts_only_on_the_terminal_and_without_a_tag() -> None:
    def logs(console: bool, form: str) -> list[Event]:
        return [event("log", line=5, text=f"epoch {n}", level="INFO", logger="t", console=console, format=form) for n in range(3)]

    assert len(findings(EveryRankPrints, two(logs(True, "%(message)s"), logs(True, "%(message)s")))) == 1
    assert findings(EveryRankPrints, two(logs(False, ""), logs(False, ""))) == []
    assert findings(EveryRankPrints, two(logs(True, "[rank 0] %(message)s"), logs(True, "[rank 1] %(message)s"))) == []


def opens(path: str = "/w/metrics.csv", mode: str = "a", y: int = 5, **fields: object) -> Event:
    return event("open", line=18, path=path, mode=mode, exists=True, y=y, **({"locks": 0} | fields))


def test_same_file_from_two_ranks() -> None:
    found = findings(EveryRankWritesOutput, two([opens(y=5), opens(y=9)], [opens(y=5), opens(y=9)]))
    assert [(f.code, f.severity, f.ranks) for f in found] == [("OUT103", Severity.WARNING, (0, 1))]
    assert "metrics.csv" in found[0].message and found[0].where is not None and found[0].where.line == 18


@pytest.mark.parametrize(
    ("zero", "one"),
    [
        ([opens()], []),
        ([opens()], [opens(path="/w/metrics-1.csv")]),
        ([opens(y=5)], [opens(y=6)]),  # they take turns
        ([opens(mode="x")], [opens(mode="x")]),
        ([opens(mode="w", locks=1)], [opens(mode="w", locks=1)]),
        ([opens(mode="+")], [opens(mode="+")]),
        ([opens(mode="w")], [opens(mode="r")]),
        ([opens(path="/w/data.lock", mode="w")], [opens(path="/w/data.lock", mode="w")]),
    ],
)
def test_healthy_ways_to_write(zero: list[Event], one: list[Event]) -> None:
    assert findings(EveryRankWritesOutput, two(zero, one)) == []


def test_two_hosts_may_have_a_disk_each() -> None:
    apart = run([recording([opens()], rank=0, host="a"), recording([opens()], rank=1, host="b")])
    assert findings(EveryRankWritesOutput, apart) == []


def test_files_of_torch_save_are_left_to_ckp() -> None:
    events = [event("save", line=18, path="/w/m.pt", done=False), opens(path="/w/m.pt", mode="w")]
    assert findings(EveryRankWritesOutput, two(events, events)) == []


def test_atomic_replacement_is_advice() -> None:
    def moves(rank: int) -> list[Event]:
        return [event("rename", line=7, src=f"/w/t{rank}", dst="/w/cache.bin", y=2)]

    assert [f.severity for f in findings(EveryRankWritesOutput, two(moves(0), moves(1)))] == [Severity.ADVICE]


PARTIAL, GONE = "/w/cache/v3.partial", "[Errno 2] No such file or directory: 'cache/v3.partial' -> 'cache/v3.npz'"


def builds(*more: Event, opened: bool = True) -> list[Event]:
    """A file made under one temporary name on every rank."""
    made = [event("open", line=46, path=PARTIAL, mode="w", exists=False, y=1, locks=0)] if opened else []
    return [*made, event("rename", line=51, src=PARTIAL, dst="/w/cache/v3.npz", y=1), *more]


def raises(message: str = GONE, kind: str = "FileNotFoundError") -> Event:
    return event("failure", line=51, type=kind, message=message, frames=[])


@pytest.mark.parametrize("opened", [True, False])
def test_a_rank_that_falls_over_the_shared_temporary_name_is_one_finding(opened: bool) -> None:
    _, found = judge(two(builds(opened=opened), builds(raises(), opened=opened), exits=(0, 1)), select=("OUT103", "LAU101"))
    assert [(f.code, f.severity, f.consequences) for f in found] == [("OUT103", Severity.ERROR, ("LAU101",))]
    assert found[0].where is not None and found[0].where.line == 51 and "rank 1 failed for it" in found[0].message
    assert any("rank 0 renames it to v3.npz at line 51" in note for note in found[0].notes)


@pytest.mark.parametrize("other", [raises("[Errno 2] No such file or directory: 'data/train.bin'"), raises("cache/v3.partial", "ValueError")])
def test_a_failure_of_another_kind_stands_beside_the_shared_file(other: Event) -> None:
    _, found = judge(two(builds(), builds(other), exits=(0, 1)), select=("OUT103", "LAU101"))
    assert [(f.code, f.severity, f.consequences) for f in found] == [("LAU101", Severity.ERROR, ()), ("OUT103", Severity.WARNING, ())]


def test_one_temporary_name_is_told_once_and_not_called_a_copy_of_its_own() -> None:
    (found,) = findings(EveryRankWritesOutput, two(builds(), builds()))
    assert found.severity is Severity.WARNING and "may be half written" in found.notes[-1]
    (unseen,) = findings(EveryRankWritesOutput, two(builds(opened=False), builds(opened=False)))
    assert unseen.severity is Severity.ADVICE and "own copy" not in unseen.message and "never half written" not in "".join(unseen.notes)


def test_collective_counts_that_differ_are_inconclusive() -> None:
    one = [opens(y=5), event("end", y=9, how="exit")]
    other = [opens(y=5), event("end", y=12, how="exit")]
    assert findings(EveryRankWritesOutput, two(one, other)) == []


def test_folders_named_by_the_clock() -> None:
    def made(path: str) -> list[Event]:
        return [event("mkdir", line=30, path=path, y=1)]

    found = findings(EveryRankWritesOutput, two(made("/w/runs/20240101-120001"), made("/w/runs/20240101-120002")))
    assert [f.code for f in found] == ["OUT103"] and "clock" in found[0].message
    parents = [event("mkdir", line=30, path="/w/runs", y=1), *made("/w/runs/20240101-120001")]
    assert len(findings(EveryRankWritesOutput, two(parents, made("/w/runs/20240101-120002")))) == 1
    assert len(findings(EveryRankWritesOutput, two(made("/w/runs/3f9a01bc"), made("/w/runs/77ab02e1")))) == 1
    assert len(findings(EveryRankWritesOutput, two(made("/w/runs/120001_3f9a01"), made("/w/runs/120001_770281")))) == 1  # a uuid's piece without a letter
    assert findings(EveryRankWritesOutput, two(made("/w/3f9a01bc/000000"), made("/w/3f9a01bc/000001"))) == []  # ranks in six digits below a hash
    assert findings(EveryRankWritesOutput, two(made("/tmp/tmp3f9a01bc"), made("/tmp/tmp77ab02e1"))) == []
    assert findings(EveryRankWritesOutput, two(made("/w/runs/20240101-120001"), made("/w/runs/20240101-120001"))) == []
    assert findings(EveryRankWritesOutput, two(made("/w/120000/rank0"), made("/w/120000/rank1"))) == []
    assert findings(EveryRankWritesOutput, two(made("/w/runs/120001-0"), made("/w/runs/120001-1"))) == []
    assert findings(EveryRankWritesOutput, two(made("/w/runs/20240101-120001"), [])) == []


def test_two_event_files_in_one_folder() -> None:
    def writer(folder: str, pid: int) -> list[Event]:
        return [opens(path=f"{folder}/events.out.tfevents.1.h.{pid}.0", mode="w")]

    found = findings(TwoWritersOneLogDir, two(writer("/w/runs", 1), writer("/w/runs", 2)))
    assert [(f.code, f.ranks) for f in found] == [("OUT104", (0, 1))]
    assert findings(TwoWritersOneLogDir, two(writer("/w/runs/0", 1), writer("/w/runs/1", 2))) == []
    assert findings(TwoWritersOneLogDir, two(writer("/w/runs", 1) + writer("/w/runs", 3), [])) == []


def losses(*values: float) -> list[bytes]:
    return [row(step, loss=value) for step, value in enumerate(values)]


def test_local_loss_is_advice() -> None:
    said = [event("print", line=9, s=1, text="loss 0.5123", stream=1), event("print", line=9, s=2, text="loss 0.4001", stream=1)]
    both = run([recording(said, losses(0.51231, 0.40009), rank=0), recording([], losses(0.6, 0.5), rank=1)])
    assert [(f.code, f.severity) for f in findings(PrintsLocalLoss, both)] == [("OUT105", Severity.ADVICE)]


@pytest.mark.parametrize("text", ["loss (rank 0) {}", "local loss {}", "worker loss: {}"])
def test_a_line_that_says_whose_loss_it_is_is_healthy(text: str) -> None:
    said = [event("print", line=9, s=s, text=text.format(v), stream=1) for s, v in ((1, "0.5123"), (2, "0.4001"))]
    both = run([recording(said, losses(0.51231, 0.40009), rank=0), recording([], losses(0.6, 0.5), rank=1)])
    assert findings(PrintsLocalLoss, both) == []


def test_a_line_that_speaks_of_workers_elsewhere() -> None:
    said = [event("print", line=9, s=s, text=f"loss {v} batch 16 a worker", stream=1) for s, v in ((1, "0.5123"), (2, "0.4001"))]
    both = run([recording(said, losses(0.51231, 0.40009), rank=0), recording([], losses(0.6, 0.5), rank=1)])
    assert len(findings(PrintsLocalLoss, both)) == 1


def test_mean_loss_is_healthy() -> None:
    said = [event("print", line=9, s=1, text="loss 0.5562", stream=1), event("print", line=9, s=2, text="loss 0.4501", stream=1)]
    both = run([recording(said, losses(0.51231, 0.40009), rank=0), recording([], losses(0.6, 0.5), rank=1)])
    assert findings(PrintsLocalLoss, both) == []


def test_a_line_with_the_losses_of_all_ranks_is_healthy() -> None:
    texts = ("net 0 loss 0.512 | net 1 loss 0.600", "net 0 loss 0.400 | net 1 loss 0.500")
    said = [event("print", line=9, s=s, text=text, stream=1) for s, text in enumerate(texts, 1)]
    both = run([recording(said, losses(0.51231, 0.40009), rank=0), recording([], losses(0.6, 0.5), rank=1)])
    assert findings(PrintsLocalLoss, both) == []
    three = run([recording(said, losses(0.51231, 0.40009), rank=0), recording([], losses(0.6, 0.5), rank=1), recording([], losses(0.7, 0.6), rank=2)])
    assert len(findings(PrintsLocalLoss, three)) == 1  # the third one's is not shown


@pytest.mark.parametrize(("backwards", "fires"), [(1, False), (2, True)])
def test_a_reduced_loss_that_is_now_and_then_the_own_one(backwards: int, fires: bool) -> None:
    """Two of five lines show a number that is the loss of the last step as well; of several losses of a step it may be another one."""
    own, other = (0.5, 0.41, 0.33, 0.29, 0.22), (0.6, 0.5, 0.4, 0.3, 0.3)
    shown = (0.5, 0.41, 0.37, 0.31, 0.26)
    said = [event("print", line=9, s=s + 1, text=f"epoch {s} loss {v:.4f}", stream=1) for s, v in enumerate(shown)]
    rows = [[row(s, loss=v, num_backward=backwards) for s, v in enumerate(values)] for values in (own, other)]
    both = run([recording(said, rows[0], rank=0), recording([], rows[1], rank=1)])
    assert bool(findings(PrintsLocalLoss, both)) == fires


def test_lines_of_another_form_do_not_speak_against_it() -> None:
    texts = ["loss 0.5123", "valid loss 0.4444", "loss 0.4001", "valid loss 0.4321"]
    said = [event("print", line=9, s=1 + i // 2, text=text, stream=1) for i, text in enumerate(texts)]
    both = run([recording(said, losses(0.51231, 0.40009), rank=0), recording([], losses(0.6, 0.5), rank=1)])
    assert [f.evidence for f in findings(PrintsLocalLoss, both)] == [{"lines": 2}]


def test_torn_event_file() -> None:
    path = "/w/runs/events.out.tfevents.1.h.77.0"
    found = findings(EventFileHalfWritten, two([opens(path=path, mode="r"), event("event_file", path=path, torn_at=40, size=55)], []))
    assert [(f.code, f.severity) for f in found] == [("OUT106", Severity.WARNING)]
    assert "40" in found[0].notes[0]
    assert findings(EventFileHalfWritten, two([opens(path=path, mode="w")], [])) == []


def event_file(path: Path, *lengths: int, cut: int = 0) -> str:
    """Records of these lengths, without the last `cut` bytes."""
    blob = b"".join(struct.pack("<QI", n, 0) + b"x" * n + struct.pack("<I", 0) for n in lengths)
    path.write_bytes(blob[: len(blob) - cut])
    return str(path)


def test_where_an_event_file_is_torn(tmp_path: Path) -> None:
    assert eventfiles.torn_at(event_file(tmp_path / "whole", 3, 40)) == -1
    assert eventfiles.torn_at(event_file(tmp_path / "empty")) == -1
    assert eventfiles.torn_at(event_file(tmp_path / "data", 3, 40, cut=10)) == 19
    assert eventfiles.torn_at(event_file(tmp_path / "head", 3, 40, cut=50)) == 19


def test_whether_the_writer_lives() -> None:
    host = os.uname().nodename
    assert eventfiles.writer_lives(f"/w/events.out.tfevents.1.{host}.{os.getpid()}.0")
    assert not eventfiles.writer_lives(f"/w/events.out.tfevents.1.elsewhere.{os.getpid()}.0")
    assert not eventfiles.writer_lives("/w/events.out.tfevents.1.v2")


# ---- OUT107 ----
def removes(path: str = "/w/run", y: int = 3, how: str = "tree", **fields: object) -> Event:
    return event("remove", line=16, path=path, how=how, exists=True, locks=0, y=y, **fields)


def makes(path: str = "/w/run/checkpoints", y: int = 3) -> Event:
    return event("mkdir", line=18, path=path, y=y)


def test_every_rank_clears_the_run_folder() -> None:
    found = findings(FolderClearedBySeveralRanks, two([removes(), makes()], [removes(), makes()]))
    assert [(f.code, f.severity, f.ranks) for f in found] == [("OUT107", Severity.WARNING, (0, 1))]
    assert found[0].where is not None and found[0].where.line == 16 and found[0].message.startswith("2 ranks remove")


def test_rank_0_clears_what_another_rank_fills() -> None:
    found = findings(FolderClearedBySeveralRanks, two([removes()], [event("save", line=30, path="/w/run/a.pt", done=False, y=3)]))
    assert [f.ranks for f in found] == [(0,)] and "while rank 1" in found[0].message
    log = event("open", line=30, path="/w/log.csv", mode="a", y=3)
    assert len(findings(FolderClearedBySeveralRanks, two([log], [removes("/w/log.csv", how="file")]))) == 1


def test_a_rank_falls_over_what_another_one_removes() -> None:
    frames = [{"file": "/home/u/train.py", "line": 16}]
    failure = event("failure", type="FileNotFoundError", message="checkpoints", frames=frames)
    found = findings(FolderClearedBySeveralRanks, two([removes()], [removes(), failure], exits=(0, 1)))
    assert [f.severity for f in found] == [Severity.ERROR] and found[0].ranks == (0, 1)


def test_clearing_that_harms_nobody() -> None:
    def silent(*by_rank: list[Event]) -> None:
        assert findings(FolderClearedBySeveralRanks, two(*by_rank)) == []

    silent([removes(), makes(), makes(y=4)], [makes(y=4)])  # rank 0 clears, the others wait
    silent([removes("/w/rank0"), makes("/w/rank0")], [removes("/w/rank1"), makes("/w/rank1")])
    silent([makes(y=3), removes(y=9)], [makes(y=3), removes(y=9)])  # a scratch folder, cleared by all at the end
    silent([removes("/w/a.lock", how="file")], [event("open", line=9, path="/w/a.lock.1", mode="w", y=3)])
    guarded = [event("remove", line=16, path="/w/run", how="tree", exists=True, locks=1, y=3), makes()]
    silent(guarded, guarded)


def test_a_rank_that_is_text() -> None:
    told = event("rank_text", line=15, name="RANK", variable="RANK", value="0")
    (found,) = findings(RankAsText, run([recording([told], rank=r) for r in range(2)]))
    assert found.ranks == (0, 1) and found.where is not None and found.where.line == 15 and "'0'" in found.message
    assert findings(RankAsText, run([recording(rank=r) for r in range(2)])) == []

