"""Where each rank stood when nothing moved any more: from the probe's own notes of standstill, the stacks that were asked for, or the
last collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness import frames
from harness.checks.base import NotApplicable
from harness.checks.lau import blame
from harness.model import RankStacks, Where
from harness.probe import protocol
from harness.record import Event, Recording, Run, where_of

MOVES = (
    "coll", "pg", "store", "pg_destroy", "wrapping", "wrap", "loader", "pass", "accumulation", "process_start", "process_join", protocol.FAILURE,
)  # fmt: skip
LOCAL = ("", "data")  # what a rank does alone
WAITING_FUNCTIONS = {
    "all_reduce", "broadcast", "reduce", "all_gather", "gather", "gather_single", "scatter", "reduce_scatter", *protocol.GATHER_INTO,
    *protocol.REDUCE_SCATTER_INTO, "all_to_all", "all_to_all_single", "barrier", "monitored_barrier", "all_gather_object", "gather_object",
    "broadcast_object_list", "scatter_object_list", "recv", "send", "init_process_group", "destroy_process_group", "_engine_run_backward",
    "_verify_param_shape_across_processes", protocol.WAITING,
}  # fmt: skip
NAMES = {
    "_engine_run_backward": "backward",
    protocol.WAITING: "wait",
    "init_process_group": "init",
    "destroy_process_group": "destroy",
    "_verify_param_shape_across_processes": "ddp_init",
}


@dataclass(frozen=True)
class Wait:
    """One rank at the standstill."""

    rank: int
    op: str  # the call that it is in; "" while it computes; "ended" where its process is gone
    where: Where | None
    step: int
    syncs: int  # collectives and reducing backwards so far, this one included where it is a python-level one

    @property
    def peers(self) -> bool:
        """Whether it waits for other ranks."""
        return self.op not in LOCAL and self.op != "ended"

    @property
    def place(self) -> str:
        return self.where.place if self.where is not None else "an unknown line"

    @property
    def sentence(self) -> str:
        if self.op == "ended":
            return "has ended"
        if self.op == "data":
            return f"waits for its data loader ({self.place})"
        if self.op == "":
            return f"is at {self.place}, in no collective"
        return f"waits in {words(self.op)} ({self.place})"


def words(op: str) -> str:
    """An operation as the user knows it."""
    return {
        "join": "the join of a process",
        "init": "init_process_group",
        "store": "TCPStore",
        "destroy": "destroy_process_group",
        "ddp_init": "the constructor of DistributedDataParallel",
        "ddp_forward": "the forward of DistributedDataParallel",
        "backward": "backward (gradient all-reduce)",
        "fsdp": "a collective of FSDP's own",
        "wait": "wait(), for a collective or message that was started before",
    }.get(op, op)


def hung(run: Run) -> bool:
    """Whether the run stood still: the watch says so, or every failure is that of a rank whose peer was gone."""
    if run.live:
        return False
    return run.ending.reason == "hang" or (run.ending.reason in ("exited", "timeout") and blame.only_victims(run)) or _stalled_at_limit(run)


def _stalled_at_limit(run: Run) -> bool:
    """The wall limit ended it while all ranks had been waiting for a while, much longer than they do in a step."""
    if run.ending.reason != "timeout" or not run.ending.hang_after_s:
        return False
    found = waits(run)
    return bool(found) and all(w.peers or w.op == "ended" for w in found) and any(w.peers for w in found)


def broken(run: Run) -> list[Wait]:
    """The waits of a run that broke because the ranks' collectives do not fit; none of any other."""
    return waits(run) if blame.no_fit(run) else []


def require_hang(run: Run) -> list[Wait]:
    """The waits of a hung run; none of a run that came to its end, NotApplicable for any other."""
    if not hung(run):
        if run.finished and not run.live:
            return []
        raise NotApplicable("the run neither hung nor came to its end")
    fall = blame.culprit(run)
    if fall is not None and not fall.victim:
        raise NotApplicable(f"rank {fall.rank} failed, the others only waited for it")
    found = waits(run)
    if not any(w.op != "ended" for w in found):
        raise NotApplicable("no rank told where it waits")
    return found


def waits(run: Run) -> list[Wait]:
    """One entry a rank that reported."""
    asked = {s.rank: s for s in run.ending.stacks}
    found = []
    for rank, recording in enumerate(run.ranks):
        if recording is not None:
            dump = frames.dumped_whole(run.logs.get(rank, "")) if any(e.rank == rank and e.code < 0 for e in run.ending.exits) else []
            found.append(_wait_of(rank, recording, asked.get(rank), dump, _ended(run, rank, recording)))
    return found


def stuck_alone(run: Run) -> set[int]:
    """Ranks that hang in code of their own: what the others did meanwhile, and these did not, is no cause but follows."""
    return {wait.rank for wait in waits(run) if wait.op in LOCAL} if run.ending.reason == "hang" else set()


@dataclass(frozen=True)
class Worker:
    """A process that the script made itself, at the standstill."""

    pid: int
    code: int | None  # of its end; None where it still lives
    where: Where | None
    inner: str  # its innermost function
    flushing: bool = False  # at its exit, it waits until what it put into a queue is taken out


def workers(run: Run) -> list[Worker]:
    """Processes of the script that are no ranks: hogwild workers, helpers. Only those that ended or stood still are known."""
    ranks = {id(r) for r in run.ranks}
    found = []
    for process in run.processes:
        if process.role != "child" or id(process) in ranks or process.of("pg") or process.of("store"):
            continue
        ends, stalls = process.of(protocol.END), process.of("stall")
        failed = process.of(protocol.FAILURE)
        if ends or failed:
            code = ends[-1]["code"] if ends else None
            found.append(
                Worker(process.pid, code if isinstance(code, int) else int(bool(failed)), failed[-1].where if failed else None, "")
            )
        elif stalls and stalls[-1].t_ns >= last_moved(process):
            found.append(Worker(process.pid, None, _place(stalls[-1]), str(stalls[-1]["inner"] or ""), bool(stalls[-1]["flushing"])))
    return found


def _ended(run: Run, rank: int, recording: Recording) -> bool:
    """Whether its process had gone by itself, in good order."""
    exits = {e.rank: e for e in run.ending.exits}
    known = exits.get(rank)
    return (known is not None and not known.by_us and known.code == 0) or (known is None and bool(recording.of(protocol.END)))


def _wait_of(rank: int, recording: Recording, asked: RankStacks | None, dump: Sequence[Where], ended: bool) -> Wait:
    step, syncs = recording.num_steps, _syncs(recording)
    if ended:
        last = recording.of("coll")
        return Wait(rank, "ended", last[-1].where if last else None, step, syncs)
    failed = [e for e in recording.of(protocol.FAILURE) if blame.is_victim(e)]
    if failed:
        return Wait(rank, str(failed[0]["op"] or _inner(failed[0])), failed[0].where, step, syncs)
    noted = max((*recording.of("stall"), *recording.of(protocol.STACKS)), key=lambda e: e.t_ns, default=None)
    if noted is not None and noted["op"] is not None and noted.t_ns >= last_moved(recording):
        return Wait(rank, str(noted["op"]), _place(noted), step, syncs)
    if asked is not None:
        op, where = _of_frames(list(asked.threads.get("MainThread", ()))[::-1])
        return Wait(rank, op, where, step, syncs)
    if dump:
        op, where = _of_frames(dump)
        return Wait(rank, op, where, step, syncs)
    page = recording.status
    if page is not None and page.op and page.site and page.since_ns >= last_moved(recording):
        return Wait(rank, page.op, _spoken(page.site), step, syncs)
    waiting = [e for e in (*recording.of("coll"), *recording.of("pg"), *recording.of("wrapping")) if not e["done"]]
    last = [e for e in waiting if e.t_ns >= last_moved(recording)]
    if last:
        op = {"pg": "init", "wrapping": "ddp_init"}.get(last[-1].kind, str(last[-1]["op"] or ""))
        return Wait(rank, op, last[-1].where, step, syncs)
    return Wait(rank, "", None, step, syncs)


def _inner(failure: Event) -> str:
    """The collective inside of torch that a victim was in: no call of the script's."""
    if "/fsdp/" in str(failure["trace"] or ""):
        return "fsdp"
    inner = str(failure["inner"] or "")
    return NAMES.get(inner, inner) if inner in WAITING_FUNCTIONS else ""


def _syncs(recording: Recording) -> int:
    counts = [e["y"] for e in recording.events[-200:] if isinstance(e["y"], int)]
    return max(counts, default=0)


def last_moved(recording: Recording) -> int:
    """When the rank last got on: what it prints, sleeps or draws meanwhile is no progress."""
    last = max((e.t_ns for kind in MOVES for e in recording.of(kind)), default=0)
    rows = recording.row(recording.num_rows - 1).t_ns if recording.num_rows else 0
    return max(last, rows)


def _place(event: Event) -> Where | None:
    """The user's line of a "stall" or "stacks" event: the one of the blocking call, with its text."""
    at, stack = _spoken(str(event["op_site"] or "")), _frames(event)
    if at is not None:
        return next((f for f in stack if f.file == at.file and f.line == at.line), at)
    return event.where or next(iter(stack), None)


def _spoken(site: str) -> Where | None:
    """ "file:line:function" as a place."""
    file, _, function = site.rpartition(":")
    file, _, line = file.rpartition(":")
    return Where(file, int(line), function) if file and line.isdecimal() else None


def _frames(event: Event) -> list[Where]:
    threads = event["threads"]
    raw = event["stack"] if event.kind == "stall" else threads.get("MainThread") if isinstance(threads, dict) else None
    found = [where_of(frame) for frame in raw] if isinstance(raw, list) else []
    return [w for w in found if w is not None and frames.is_users(w.file)]


def _of_frames(stack: Sequence[Where]) -> tuple[str, Where | None]:
    """(the call that a stack is in, the user's line), innermost frame first."""
    functions = [protocol.WAITING if f.file.endswith(protocol.WAITING_FILE) else f.function for f in stack]
    op = next((NAMES.get(f, f) for f in functions if f in WAITING_FUNCTIONS), "")
    return op, next((f for f in stack if frames.is_users(f.file)), None)


def describe(found: Sequence[Wait]) -> str:
    """ "ranks 0,2 wait in all_reduce (train.py:88); rank 1 waits in barrier (train.py:61)" """
    groups: dict[str, list[int]] = {}
    for wait in found:
        groups.setdefault(wait.sentence, []).append(wait.rank)
    parts = []
    for sentence, ranks in sorted(groups.items(), key=lambda item: item[1]):
        many = (
            sentence.replace("waits", "wait", 1)
            .replace("is at", "are at", 1)
            .replace("has ended", "have ended", 1)
            .replace("its data", "their data", 1)
        )
        parts.append(f"{blame.plural(ranks)} {sentence if len(ranks) == 1 else many}")
    return "; ".join(parts)


def notes(found: Sequence[Wait]) -> list[str]:
    steps = {w.step for w in found}
    calls = {w.syncs for w in found}
    lines = [f"{blame.plural([w.rank for w in found])} took {next(iter(steps))} steps"] if steps else []
    if len(steps) > 1:
        lines = [", ".join(f"rank {w.rank} took {w.step} steps" for w in found[:8])]
    if len(calls) > 1:
        lines.append(", ".join(f"rank {w.rank} is at its collective {w.syncs}" for w in found[:8]))
    return lines


def standing(run: Run) -> list[str]:
    """For the notes of a finding of another family: who waited where when the run stood still."""
    if not hung(run):
        return []
    found = waits(run)
    return [describe(found)] if any(w.peers for w in found) else []


def odd_one_out(found: Sequence[Wait]) -> Wait:
    """The wait to look at first: the minority's; among equals a collective that the script calls itself, rank 0's before others'."""
    counts: dict[tuple[str, str], int] = {}
    for wait in found:
        counts[(wait.op, wait.place)] = counts.get((wait.op, wait.place), 0) + 1
    return min(found, key=lambda w: (counts[(w.op, w.place)], w.op in ("backward", "ddp_forward", "fsdp", "ended", ""), w.rank))
