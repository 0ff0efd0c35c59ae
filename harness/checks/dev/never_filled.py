"""DEV111 never-filled: to_empty() gave memory to a buffer or parameter, and nothing has been written to it when the model reads it.

What it does
    Remembers what lay in the memory that `to_empty()` gave to a model's parameters and buffers. Those that are still the same objects, without a write
    and with the same content, at the end of the first forward that reads their values, are an error.

Why it is bad
    They hold what another tensor left there: numbers that differ by run and by rank, or NaN. A checkpoint brings the parameters, and the buffers that are
    in the state dict; a buffer with `persistent=False` (rotary frequencies, a mask, position ids) is in none. Where the memory happens to be zero, the
    model runs and is another one.

Wrong
    with torch.device("meta"):
        model = Transformer()
    model.to_empty(device=device)
    model.load_state_dict(state)                       # inv_freq is not in it

Right
    model.to_empty(device=device)
    model.load_state_dict(state)
    for module in model.modules():
        if isinstance(module, Rotary):
            module.inv_freq.copy_(frequencies(module.dim))

Known limits
    Looks at forwards before the first step, where the source of the reading line can be read, and not under torch.compile. What the forward fills by
    itself, or only asks for its shape or device, is healthy, and a part that has no element so far (`bank[:filled]`).
    Memory that holds zeros is told of buffers alone, where every rank found it so, and not where the script writes through `.data`, which
    leaves no trace. Parameters that FSDP1 has flattened are not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Event, Run, where_of

SHOWN = 3


@dataclass(frozen=True)
class Unfilled:
    name: str
    is_buffer: bool
    is_kept: bool  # the state dict has it
    zeros: bool


class NeverFilled(Check):
    code = "DEV111"
    name = "never-filled"
    severity = Severity.ERROR
    explains = ("OPT112", "OPT118", "SYN101")

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(r.num_rows or r.of("never_filled") for r in run.processes):
            raise NotApplicable("nothing was trained")
        told = [(rank, e, found) for rank, e in run.events("never_filled") if (found := _sure(run, e))]
        if told:
            yield self._found(told)

    def _found(self, told: list[tuple[int, Event, list[Unfilled]]]) -> Finding:
        _, event, found = told[0]
        read = where_of(event["read"])
        kept = [u for u in found if u.is_kept]
        notes = [f"line {read.line} reads it: {read.text}"] if read is not None else []
        if not kept:
            notes.append("the state dict has none of them (persistent=False): a checkpoint does not bring them")
        return self.finding(
            f"{_named(found)} never written after to_empty(): the model computes with what was left in that memory",
            where=event.where,
            ranks=replicas.rank_list([rank for rank, _, _ in told]),
            notes=notes,
            help="fill it after to_empty(): call the code that computes it in the constructor once more, or build the model on its device"
            if not kept
            else "initialise or load all of it after to_empty(), and look at what load_state_dict(strict=False) says is missing",
        )


def _named(found: Sequence[Unfilled]) -> str:
    kinds = {"buffer" if u.is_buffer else "parameter" for u in found}
    kind = kinds.pop() if len(kinds) == 1 else "tensor"
    names = ", ".join(f"`{u.name}`" for u in found[:SHOWN]) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
    return f"the {kind} {names} was" if len(found) == 1 else f"the {kind}s {names} were"


def _sure(run: Run, event: Event) -> list[Unfilled]:
    """Zeros may have been written: by a broadcast that a rank without to_empty() sends, through `.data`."""
    listed = [_listed(e) for _, e in run.events("never_filled")]
    same = len(listed) >= len(run.present) and not event["data_writes"]
    return [u for u in _listed(event) if not u.zeros or (same and u.is_buffer and all(any(v.name == u.name for v in other) for other in listed))]


def _listed(event: Event) -> list[Unfilled]:
    rows = event["names"]
    good = [r for r in rows if isinstance(r, list) and len(r) == 4] if isinstance(rows, list) else []
    return [Unfilled(str(r[0]), bool(r[1]), bool(r[2]), bool(r[3])) for r in good]
