"""Who failed, and who only fell with the others. The launcher blames whoever it saw first, in most runs a victim.

A rank is a *victim* where its exception says that a peer went away (connection closed, reset, broken pipe, timeout inside a collective),
*torn down* where we ended it. What is left are the culprits, the earliest first.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.frames import is_users
from harness.model import RankExit, Where
from harness.probe import protocol
from harness.record import Event, Recording, Run

PEER_GONE = re.compile(
    r"connection closed by peer|connection reset by peer|broken pipe|socket closed|timed out waiting \d+ ?ms for (recv|send)"
    r"|connection was likely closed"
    r"|application timeout caused pair closure|remote process (has )?exited|broken connection|connection refused.*(remote|peer)"
    r"|unbound buffer"
    r"|\[[^\]]*gloo/transport/tcp/[^\]]*\].*(closed|reset|timed out|timeout)|ncclremoteerror|watchdog caught collective operation timeout"
    r"|failed to recv, got 0 bytes|recvvalue failed|sendbytes failed|recvbytes failed|the client socket has (failed|timed out)"
    r"|nccl communicator was aborted|monitoredbarrier",
    re.IGNORECASE | re.DOTALL,
)
# what gloo and TORCH_DISTRIBUTED_DEBUG=DETAIL say where the ranks' calls do not fit each other
NO_FIT = re.compile(r"op\.preamble\.length <= op\.nbytes|Received data size doesn't match expected size|Detected mismatch between collectives")
OWN_PEER = re.compile(r"multiprocessing/connection\.py|torch/utils/data/dataloader\.py")
PASSED_ON = ("ProcessRaisedException", "ProcessExitedException")  # torch.multiprocessing.spawn in the parent
STOPPED_BY = ("KeyboardInterrupt", "SignalException")  # the latter is what torch's agent makes of a SIGTERM, in a script that calls it
WORKER = re.compile(r"^Caught \w+ in (\w+ worker process \d+)\.")
INNER_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)$', re.MULTILINE)
SIGNAL_EXITS = {128 + signal.SIGTERM, 128 + signal.SIGKILL}


@dataclass(frozen=True)
class Fall:
    """How one rank fell by itself."""

    rank: int
    t_ns: int
    kind: str  # "exception" | "signal" | "exit"
    victim: bool
    event: Event | None = None
    exit: RankExit | None = None

    @property
    def where(self) -> Where | None:
        """The innermost user line; inside a loader worker where the exception came from one."""
        if self.event is None:
            return None
        text = str(self.event["message"] or "")
        inner = [f for f in INNER_FRAME.findall(text) if is_users(f[0])] if WORKER.match(text) else []
        return Where(inner[-1][0], int(inner[-1][1]), inner[-1][2], inner[-1][3].strip()) if inner else self.event.where

    @property
    def headline(self) -> str:
        """Type and first line of the message."""
        if self.event is None:
            return ""
        text = str(self.event["message"] or "").strip()
        first = text.splitlines()[0] if text else ""
        if worker := WORKER.match(text):
            return f"{text.splitlines()[-1].strip()[:300]} in {worker[1]}"
        kind = str(self.event["type"] or "exception")
        return f"{kind}: {first[:300]}" if first else kind


def is_victim(event: Event) -> bool:
    """Whether a failure event says that a peer went away."""
    text = f"{event['type']}: {event['message']}"
    own = event["op"] == "data" or bool(OWN_PEER.search(str(event["trace"] or "")))  # the peer is a loader worker of its own
    lost = bool(PEER_GONE.search(text)) and not own
    return lost or event["type"] in STOPPED_BY


def failures(run: Run) -> Iterator[tuple[int, Recording, Event]]:
    """(rank, process, failure event) of the ranks and of processes that they made.

    A parent that only passes on the failure of its child is left out, and so is what another world tells of its own.
    """
    children = any(process.role == "child" and process.of(protocol.FAILURE) for process in run.processes)
    ranks = {id(r): rank for rank, r in enumerate(run.ranks) if r is not None}
    by_pid = {r.pid: rank for rank, r in enumerate(run.ranks) if r is not None}
    for process in run.processes:
        if process.stem in run.aside:
            continue
        events = [e for e in process.of(protocol.FAILURE) if not (children and process.role == "main" and e["type"] in PASSED_ON)]
        if events:
            rank = ranks.get(id(process), by_pid.get(process.ppid, max(process.env_rank, 0)))
            yield from ((rank, process, event) for event in events)


def _exception_falls(run: Run) -> Iterator[Fall]:
    exits = {e.rank: e for e in run.ending.exits}
    for rank, process, event in failures(run):
        ended = exits.get(rank)
        if ended is not None and ended.code == 0 and process.role != "child":
            continue  # it was caught, or a helper thread's: the rank went on and ended well
        yield Fall(rank, event.t_ns, "exception", is_victim(event), event, ended if process.role != "child" else None)


def falls(run: Run) -> list[Fall]:
    """Every rank that fell by itself, one entry each, the earliest first."""
    found: dict[int, Fall] = {}
    for fall in sorted(_exception_falls(run), key=lambda f: (f.victim, f.t_ns)):
        found.setdefault(fall.rank, fall)
    for ended in run.ending.exits:
        if ended.code == 0 or ended.by_us:
            continue
        known = found.get(ended.rank)
        if ended.code > 0 and (known is not None or (found and _is_spawned(run, ended.rank))):
            continue
        if ended.code < 0:
            victim = bool(PEER_GONE.search(run.logs.get(ended.rank, "")[-8000:])) or (known is not None and known.victim)
            if known is None or known.victim:
                found[ended.rank] = Fall(ended.rank, ended.time_ns, "signal", victim, known.event if known else None, ended)
        else:
            victim = ended.code in SIGNAL_EXITS or bool(PEER_GONE.search(run.logs.get(ended.rank, "")[-4000:]))
            found[ended.rank] = Fall(ended.rank, ended.time_ns, "exit", victim, None, ended)
    return _without_terminated(sorted(found.values(), key=lambda f: f.t_ns))


def _is_spawned(run: Run, rank: int) -> bool:
    """Whether the launcher's process of this number is the parent of the ranks, and its exit code passes on that one of them failed."""
    recording = run.ranks[rank] if 0 <= rank < len(run.ranks) else None
    return recording is not None and recording.role == "child"


def _without_terminated(ordered: list[Fall]) -> list[Fall]:
    """A rank that SIGTERM ended fell with the others; where nobody fell for a reason of its own, somebody sent it to the first."""
    terminated = [f for f in ordered if f.kind == "signal" and f.exit is not None and f.exit.code == -signal.SIGTERM]
    alone = all(f.victim or f in terminated for f in ordered)
    return [replace(f, victim=True) if f in terminated and not (alone and f is terminated[0]) else f for f in ordered]


def culprit(run: Run) -> Fall | None:
    """The earliest that is no victim; else the earliest victim; None where nobody fell."""
    all_falls = falls(run)
    first = next((f for f in all_falls if not f.victim), all_falls[0] if all_falls else None)
    return first if first is None or first.kind != "exit" else _who_says_why(run, first, all_falls)


def _who_says_why(run: Run, first: Fall, all_falls: list[Fall]) -> Fall:
    """`sys.exit(text if rank == 0 else 1)`: of the ranks that leave by one statement, the one that gives a reason and not a number."""
    leaves = exit_call(run, first)
    if leaves is None or leaves.where is None or isinstance(leaves["code"], str):
        return first
    for fall in all_falls:
        call = exit_call(run, fall) if fall.kind == "exit" and not fall.victim else None
        if call is not None and isinstance(call["code"], str) and call.where == leaves.where:
            return fall
    return first


def exit_call(run: Run, fall: Fall) -> Event | None:
    """The last call by which a rank can have ended itself with the code that it ended with."""
    recording = run.ranks[fall.rank] if 0 <= fall.rank < len(run.ranks) else None
    code = fall.exit.code if fall.exit is not None else 1
    calls = recording.of("exit_call") if recording is not None else []
    return next((e for e in calls[::-1] if ends_with(e, code) and e.where is not None), None)


def sender(run: Run, ended: RankExit) -> tuple[int, Event] | None:
    """(rank, call) of the os.kill() in the script that sent the signal by which a rank ended; None where it came from elsewhere."""
    for process in run.processes:
        for call in reversed(process.of("kill_call")):
            if call["signal"] == -ended.code and call["pid"] in (ended.pid, 0) and call.t_ns <= ended.time_ns:
                return max(process.rank, process.env_rank, 0), call
    return None


def ends_with(call: Event, code: int) -> bool:
    """Whether this exit call gives this exit code: a text gives 1, a number its low byte."""
    status = call["code"]
    return code == (status & 0xFF) if isinstance(status, int) else code == 1


def fell_alone(run: Run) -> bool:
    """Whether a rank fell for a reason of its own, outside any collective: what it then missed is no cause.

    An abort inside a collective is not that: gloo aborts where sizes do not fit.
    """
    first = culprit(run)
    if first is None or first.victim:
        return False
    if first.event is not None:
        return not first.event["op"]
    if first.kind == "exit":
        return True
    return run.ending.reason != "hang" and first.exit is not None and first.exit.code < 0 and first.exit.code != -signal.SIGABRT


def no_fit(run: Run) -> bool:
    """Whether the run broke because the ranks gave one collective tensors of other sizes, or called other ones: somebody says so."""
    first = culprit(run)
    if run.live or first is None or first.victim:
        return False
    said = run.logs.get(first.rank, "")[-8000:] if first.event is None else str(first.event["message"] or "")
    return bool(NO_FIT.search(said))


def only_victims(run: Run) -> bool:
    """Whether ranks fell, and every one of them because a peer went away."""
    all_falls = falls(run)
    return bool(all_falls) and all(f.victim for f in all_falls)


def others(run: Run, blamed: Fall) -> list[str]:
    """Notes on what became of the other ranks."""
    victims = sorted(f.rank for f in falls(run) if f.rank != blamed.rank and f.victim)
    also = sorted(f.rank for f in falls(run) if f.rank != blamed.rank and not f.victim)
    torn = sorted(e.rank for e in run.ending.exits if e.by_us and e.rank != blamed.rank and e.rank not in victims)
    notes = []
    if also:
        notes.append(f"{plural(also)} failed by {'itself' if len(also) == 1 else 'themselves'} too")
    if victims:
        notes.append(f"{plural(victims)} lost the connection to a peer and fell as {'a victim' if len(victims) == 1 else 'victims'}")
    if torn:
        notes.append(f"{plural(torn)} {'was' if len(torn) == 1 else 'were'} torn down by the launcher")
    return notes


def plural(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {compress(ranks)}"


def compress(ranks: list[int]) -> str:
    """0,2-7"""
    parts: list[str] = []
    ordered = sorted(set(ranks))
    start = 0
    for i, rank in enumerate(ordered):
        if i + 1 == len(ordered) or ordered[i + 1] != rank + 1:
            first = ordered[start]
            parts.append(str(first) if first == rank else f"{first}-{rank}")
            start = i + 1
    return ",".join(parts)
