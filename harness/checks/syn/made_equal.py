"""Whether the script sent parameters from one rank to all before it trained: they are replicas then, no slices of a model that is split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from harness.probe import protocol
from harness.record import Run, number

JOINING = ("all_reduce", "reduce_scatter", "all_to_all", *protocol.REDUCE_SCATTER_INTO, "all_to_all_single")


def broadcast(run: Run, names: Sequence[str]) -> bool:
    """Before the first step and over all ranks: as many tensors of the size of each as there are parameters of that size, or all of them at once."""
    sizes = {str(n): number(s) for e in run.present[0].of(protocol.PARAMS) for n, s in zip(e["names"] or (), e["numels"] or (), strict=False)}
    sent = Counter(number(e["numel"]) for e in run.present[0].of("coll") if e["op"] == "broadcast" and not e.step and e["world"] and not e["graded"])
    held = Counter(sizes.values())
    whole = sum(sizes.values()) in sent
    return bool(names) and (whole or all(n in sizes and sent[sizes[n]] >= held[sizes[n]] for n in names))


def only_gathered(run: Run) -> bool:
    """Whether what the forward exchanges with a gradient is gathered alone, as a loss over all ranks' features does: a split model adds up as well."""
    told = [e for e in run.present[0].of("coll") if e["graphed"] and not e["inside"]]
    return bool(told) and not any(e["op"] in JOINING and number(e["numel"]) > 1 for e in told)
