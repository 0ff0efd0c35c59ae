"""What load_state_dict found and did not find, and why the names differ."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness.probe.protocol import WRAPPERS, clean_name
from harness.record import Event, Recording, Run, number, texts

COUNTERS = ("num_batches_tracked",)  # torch fills these in itself
MIN_LIKENESS = 0.75


@dataclass(frozen=True)
class StateLoad:
    """One load_state_dict of one rank."""

    rank: int
    event: Event
    recording: Recording

    @property
    def strict(self) -> bool:
        return bool(self.event["strict"])

    @property
    def error(self) -> str:
        return str(self.event["error"] or "")

    @cached_property
    def missing(self) -> list[str]:
        return [k for k in texts(self.event["missing"]) if not k.endswith(COUNTERS)]

    @cached_property
    def unexpected(self) -> list[str]:
        return texts(self.event["unexpected"])

    @property
    def matched(self) -> int:
        return number(self.event["matched"])

    @property
    def total(self) -> int:
        return number(self.event["total"])

    @cached_property
    def shapes(self) -> dict[str, Any]:
        """Shapes of the missing and of the unexpected keys; the sets of names are disjoint."""
        found: dict[str, Any] = {}
        for names, shapes in (("missing", "missing_shapes"), ("unexpected", "unexpected_shapes")):
            found.update(zip(texts(self.event[names]), self.event[shapes] or [], strict=False))
        return found

    @cached_property
    def untouched(self) -> list[str]:
        """Keys that got nothing from outside: missing ones, and those that were given the module's own memory, read out a moment ago."""
        own = texts(self.event["self_names"]) if self.event["fresh"] and self.file_names else []
        return self.missing + [k for k in own if not k.endswith(COUNTERS)]

    def fatal(self) -> bool:
        """The error of this load ended the rank."""
        first = self.error[:50]
        return bool(first) and any(first in str(e["message"]) for e in self.recording.of("failure"))

    @cached_property
    def nothing(self) -> bool:
        """Not one tensor comes from outside."""
        num_self = number(self.event["num_self"])
        return not self.error and number(self.event["num_missing"]) + num_self == self.total > 0 and (not num_self or bool(self.event["fresh"]))

    @cached_property
    def file(self) -> Event | None:
        """The file that this rank loaded last, in this step."""
        before = [e for e in self.recording.of("load") if e["done"] and not e["error"] and e.t_ns <= self.event.t_ns and e.step == self.event.step]
        return before[-1] if before else None

    @cached_property
    def file_names(self) -> list[str]:
        """Names of the tensors in the file that this rank loaded last, in this step, and put into no model since; without their entry."""
        at, file = self.event, self.file
        if file is None:
            return []
        since = [e for e in self.recording.of("load_state") if file.t_ns < e.t_ns < at.t_ns and e["mid"] != at["mid"]]
        used = any(e["source"] == file["path"] and number(e["matched"]) for e in since)
        return [] if used else [name.rsplit("/", 1)[-1] for name in texts(file["tensors"])]


def final_loads(run: Run) -> list[StateLoad]:
    """Each rank's last load into each module before it trains on: an attempt that was corrected at once does not count."""
    found: list[StateLoad] = []
    for rank, recording in enumerate(run.ranks):
        if recording is None:
            continue
        last: dict[tuple[int, int], StateLoad] = {}
        for event in recording.of("load_state"):
            last[(number(event["mid"]), event.step)] = StateLoad(rank, event, recording)
        found.extend(last.values())
    return found


def wrapper_between(missing: Sequence[str], given: Sequence[str]) -> tuple[str, str] | None:
    """(prefix that the model wants, prefix that the file has) where that is all that parts them; None: it is something else.

    A prefix is what whole leading components of the names make, so that a new head beside a common trunk is not one.
    """
    if not missing or not given:
        return None
    by_clean = {clean_name(k): k for k in given}
    pairs = [(k, by_clean[clean_name(k)]) for k in missing if clean_name(k) in by_clean]
    if len(pairs) >= max(1, 0.8 * len(missing)):
        wanted, has = pairs[0]
        return lead(wanted), lead(has)
    have = set(given)
    for prefix in dict.fromkeys(_prefixes(given)):
        if sum(prefix + k in have for k in missing) >= max(2, 0.8 * len(missing)):
            return "", prefix
    for prefix in dict.fromkeys(_prefixes(missing)):
        hits = sum(k.startswith(prefix) and k[len(prefix) :] in have for k in missing)
        if hits >= max(2, 0.8 * len(missing)):
            return prefix, ""
    return None


def dropped(load: StateLoad) -> tuple[str, str] | None:
    """The same of a load that brings nothing, where a filter of the script's (`if k in own`) may have dropped all: the file has names of the model's
    under another wrapper, and none as the model has it. How many there are is no matter: a new head is in no file. `filled`: the script has copied by hand."""
    if not load.nothing or load.unexpected or load.event["filled"]:
        return None
    given = {clean_name(n): n for n in load.file_names}
    pairs = [(k, given[clean_name(k)]) for k in load.untouched if clean_name(k) in given]
    return (lead(pairs[0][0]), lead(pairs[0][1])) if len(pairs) > 1 and all(lead(k) != lead(n) for k, n in pairs) else None


def lead(key: str) -> str:
    """The wrappers' part of a name."""
    return "".join(f"{part}." for part in key.split(".") if f"{part}." in WRAPPERS)


def _prefixes(keys: Sequence[str]) -> list[str]:
    """Leading components, one and two deep, of the first keys."""
    found: list[str] = []
    for key in keys[:40]:
        parts = key.split(".")
        found.extend(".".join(parts[:n]) + "." for n in (1, 2) if len(parts) > n)
    return found


def eaten(missing: str, unexpected: str) -> bool:
    """Whether `unexpected` is what str.lstrip or str.strip of a wrapper's letters leaves of `missing`."""
    return any(
        unexpected in (f"{w}{missing}".lstrip(w), missing.lstrip(w), missing.strip(w)) and unexpected != missing
        for w in (*WRAPPERS, "model.")
    )


def bitten(missing: str, unexpected: str) -> bool:
    """Whether `unexpected` is what str.replace(prefix, "") leaves of `missing`: a prefix taken out of the middle of a component."""
    num = len(missing) - len(unexpected)
    return num > 1 and any(
        missing[at + num - 1] == "." and missing[at - 1] != "." and missing[:at] + missing[at + num :] == unexpected
        for at in range(1, len(missing) - num)
    )


def renamed(load: StateLoad) -> dict[str, str]:
    """Missing key -> unexpected key that has, in the file, the very name that is missing (but for a wrapper's prefix): the script renamed it.
    Of most of the model: a part may be renamed to start anew."""
    came = texts(load.event["came"])
    by_name = {clean_name(name.rsplit("/", 1)[-1]): key for key, name in zip(load.unexpected, came, strict=False) if name}
    found = {k: by_name[k] for k in load.missing if k in by_name and load.shapes.get(by_name[k]) == load.shapes.get(k)}
    return found if 2 * len(found) >= load.total else {}


def entry(load: StateLoad) -> str:
    """The entry of the file in which the missing names lie, where the dict around it was given: "model" for `{"model": ..., "epoch": 3}`."""
    if load.file is None or not load.missing or load.matched:
        return ""
    outer: dict[str, int] = {}
    missing = set(load.missing)
    for name in texts(load.file["tensors"]):
        lead, _, key = name.rpartition("/")
        if lead and clean_name(key) in missing:
            outer[lead] = outer.get(lead, 0) + 1
    best = max(outer, key=lambda lead: outer[lead], default="")
    return best if best and best.split("/")[0] in load.unexpected and outer[best] >= 0.5 * len(missing) else ""


def near(load: StateLoad) -> list[tuple[str, str]]:
    """(missing key, unexpected key that is the same tensor under another name), each used once."""
    known = renamed(load)
    found: list[tuple[str, str]] = list(known.items())
    left = [u for u in load.unexpected if u not in known.values()]
    for key in load.missing:
        if key in known:
            continue
        same = [u for u in left if load.shapes.get(u) == load.shapes.get(key) and u.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
        cut = next((u for u in left if (eaten(key, u) or bitten(key, u)) and load.shapes.get(u) == load.shapes.get(key)), None)
        hit = cut or next((u for u in same if _alike(key, u)), None)
        if hit is not None:
            left.remove(hit)
            found.append((key, hit))
    return found


def _alike(a: str, b: str) -> bool:
    """Near names: the same but for a component, or for a few letters. The leaf (`weight`) says nothing."""
    a_head, b_head = a.rpartition(".")[0], b.rpartition(".")[0]
    if not a_head or not b_head:
        return False
    if a_head.endswith("." + b_head) or b_head.endswith("." + a_head):
        return True
    return difflib.SequenceMatcher(None, a_head, b_head).ratio() >= MIN_LIKENESS


def halves(load: StateLoad) -> list[str]:
    """Keys that got nothing although the file has them, in layers of which another part was loaded: nobody does that on purpose."""
    in_file = {clean_name(name) for name in load.file_names}
    idle = set(load.untouched)
    by_layer: dict[str, list[str]] = {}
    for key in idle:
        by_layer.setdefault(key.rpartition(".")[0], []).append(key)
    found: list[str] = []
    for layer, keys in by_layer.items():
        of_file = [name for name in in_file if name.rpartition(".")[0] == clean_name(layer)]
        if (
            of_file
            and any(clean_name(k) in in_file for k in keys)
            and any(n not in {clean_name(k) for k in keys} for n in of_file if not n.endswith(COUNTERS))
        ):
            found.extend(k for k in keys if clean_name(k) in in_file)
    return sorted(found)


def shown(names: Sequence[str], num: int = 3) -> str:
    return ", ".join(f"`{n}`" for n in names[:num]) + (", ..." if len(names) > num else "")
