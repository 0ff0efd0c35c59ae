"""SHM113 blocks-never-unlinked: a statement makes block after block of shared memory, all are closed, none is unlinked

What it does
    Follows `SharedMemory(create=True)` in every process. A warning at the statement that makes 32 blocks and more while the training goes on,
    where nearly all of them are closed by the process that made them and still have their name in /dev/shm when the rank ends.

Why it is bad
    `close()` gives back this process's view of a block, not the block: its memory is taken until somebody calls `unlink()`. /dev/shm
    fills by a block a batch until it is full (then writes end in a bus error) or the machine is out of memory.

Wrong
    block = SharedMemory(name=name)
    x = torch.from_numpy(np.ndarray(shape, buffer=block.buf).copy())
    block.close()

Right
    block = SharedMemory(name=name)
    x = torch.from_numpy(np.ndarray(shape, buffer=block.buf).copy())
    block.close()
    block.unlink()                     # once a block, by whoever reads it last

Known limits
    Blocks that the script names itself are not judged (they may be meant to stay), nor those of a SharedMemoryManager or of DataLoader workers, nor a
    run that did not end by itself. Blocks made before the first step, as a pool is, are no pile.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.probe import protocol
from harness.record import Event, Recording, Run, number

MIN_STEPS = 8  # of the training, that go by while the blocks are made
SHARE = 0.9  # of the blocks made; the last ones may still be open or under way to their reader


class BlocksLeft(Check):
    code = "SHM113"
    name = "blocks-never-unlinked"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        told = [(p, e) for p in run.processes for e in p.of("blocks")]
        if not told and not any(p.of("block_made") for p in run.processes):
            raise NotApplicable("the script makes no blocks of shared memory")
        if not any(p.num_rows for p in run.processes):
            raise NotApplicable("no step was taken")
        found = [(p, e) for p, e in told if e.where is not None and _stay(run, p, e) and _while_training(run, e)]
        if not found or not run.finished:
            return  # what a run unlinks at its end, it did not come to where it was ended
        _, worst = max(found, key=lambda one: number(one[1]["num"]))
        yield self.finding(
            f"{number(worst['num'])} blocks of shared memory and more made by this statement are closed and never unlinked: they fill /dev/shm",
            where=worst.where,
            ranks=sorted({p.env_rank for p, e in found if e.where == worst.where and p.env_rank >= 0}),
            notes=["each still has its name in /dev/shm when the last rank of its host ends: close() gives back the view of one process, not the block"],
            help="call `block.unlink()` once a block, in the process that is the last to read it, or write to a few blocks in turn",
        )


def _stay(run: Run, maker: Recording, made: Event) -> bool:
    """Nearly all of these blocks are there when the last rank of their host has done what it does at its end: who reads last unlinks."""
    ranks = [p for p in run.processes if p.role == "main" and p.start.get("host") == maker.start.get("host")]
    last = max(ranks, key=lambda p: max((e.t_ns for e in p.of(protocol.END)), default=0), default=None)
    left = {inode for e in (last.of("blocks_left") if last is not None else ()) for inode in _numbers(e["inodes"])}
    return len(left.intersection(_numbers(made["inodes"]))) >= SHARE * number(made["num"], 1)


def _numbers(value: object) -> list[int]:
    return [n for n in value if isinstance(n, int)] if isinstance(value, list) else []


def _while_training(run: Run, made: Event) -> bool:
    first, last = number(made["first_t"]), made.t_ns
    return bool(run.present) and min(sum(first < t < last for t in r.column("t_ns")) for r in run.present) >= MIN_STEPS
