"""What `harness selftest` does. Apart from selftest.py, which `harness --help` imports."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness import catalog
from harness.commands._output import as_json, emit, targets
from harness.commands.selftest import KINDS
from harness.errors import UsageError, did_you_mean
from harness.planted import Planted, all_planted
from harness.trials import Trial, Tried, run_trials

HANG_TIMEOUT_S = 2.0
TIMEOUT_S = 60.0
NUM_LANES = 3


@dataclass
class Tally:
    """The results, by family of the planted code."""

    tried: list[Tried] = field(default_factory=list)
    unchecked: dict[str, list[str]] = field(default_factory=dict)  # healthy scenario -> codes whose check did not run there
    wall_s: float = 0.0

    @property
    def faults(self) -> list[Tried]:
        return [t for t in self.tried if t.trial.wants is not None]

    @property
    def twins(self) -> list[Tried]:
        return [t for t in self.tried if t.trial.wants is None]

    @property
    def wrong(self) -> list[str]:
        """Whatever makes the self-test fail, one line each."""
        lines = [f"{t.trial.name}: {_mistake(t)}" for t in self.faults if not (t.right_cause and t.right_line)]
        lines += [
            f"{t.trial.name} is healthy, but: {', '.join(f.code for f in t.alarms) or f'exit code {t.exit_code}'}"
            for t in self.twins
            if t.alarms or t.exit_code
        ]
        lines += [f"{name}: not checked in the healthy twin: {', '.join(codes)}" for name, codes in self.unchecked.items() if codes]
        lines += [f"{t.trial.name}: the check {o.code} crashed" for t in self.tried for o in t.crashed]
        lines += [f"{t.trial.name}: the probe failed in {t.probe_error}" for t in self.tried if t.probe_error]
        return lines


def _mistake(tried: Tried) -> str:
    codes = ", ".join(f.code for f in tried.alarms)
    wants = tried.trial.wants
    if not tried.detected:
        return f"missed {wants}"
    if not tried.right_cause:
        return f"wanted {wants}, found {codes}"
    where = next((f.where for f in tried.alarms if f.where), None)
    return f"{wants} stands at line {where.line if where else '?'}, the edit at {tried.trial.lines}"


def selftest(args: argparse.Namespace) -> int:
    wanted = targets(args.format, "selftest", KINDS)
    planted = _chosen(args.scenarios)
    if args.list:
        emit(wanted, {"console": lambda: _listing(planted), "json": lambda: as_json([_entry(p) for p in planted])})
        return 0
    tally = _run(planted, args.scenarios, progress=sys.stderr)
    emit(wanted, {"console": lambda: _table(tally), "json": lambda: as_json(_plain(tally))})
    return 1 if tally.wrong else 0


def _chosen(words: list[str]) -> list[Planted]:
    planted = all_planted()
    if not words:
        return planted
    known = {p.full_name for p in planted} | {p.scenario for p in planted}
    for word in words:
        if word not in known:
            raise UsageError(f"no scenario or planted fault named {word!r}{did_you_mean(word, sorted(known))}")
    return [p for p in planted if p.full_name in words or p.scenario in words]


def _run(planted: list[Planted], words: list[str], progress: Any) -> Tally:
    headers = {name: catalog.builtin(name).header for name in {p.scenario for p in planted}}
    twins = [n for n in catalog.names() if not words or n in words]
    trials = [
        Trial(p.full_name, p.source, headers[p.scenario].nproc or 2, p.finds, p.lines, TIMEOUT_S, HANG_TIMEOUT_S, p.args, p.env, _timed(p))
        for p in planted
    ]
    for name in twins:
        scenario = catalog.builtin(name)
        source = catalog.read_script(catalog.scenario_dir() / f"{name}.py")
        timed = any(_timed(p) for p in planted if p.scenario == name)
        args = next((p.twin_args for p in planted if p.scenario == name), ())
        trials.append(Trial(name, source, scenario.header.nproc or 2, timeout_s=TIMEOUT_S, args=args, env=_environment(name), alone=timed))
    tally, begun = Tally(), time.monotonic()
    for number, tried in enumerate(run_trials(trials, num_lanes=NUM_LANES), 1):
        tally.tried.append(tried)
        print(
            f"{number:3d}/{len(trials)} {tried.wall_s:5.1f} s  {tried.trial.name}  {', '.join(f.code for f in tried.alarms) or 'sane'}",
            file=progress,
            flush=True,
        )
    tally.wall_s = time.monotonic() - begun
    for twin in tally.twins:
        codes = sorted({p.finds for p in planted if p.scenario == twin.trial.name})
        tally.unchecked[twin.trial.name] = [c for c in codes if not twin.ran(c)]
    return tally


def _timed(planted: Planted) -> bool:
    """Whether its finding rests on how long things take."""
    return planted.finds.startswith("PRF")


def _environment(scenario: str) -> Mapping[str, str]:
    """What planted faults of a scenario run under, a stand-in device table for instance: its healthy twin has to be checked there too."""
    given = [p.env for p in all_planted() if p.scenario == scenario and p.env]
    return max(given, key=given.count) if given else {}


def _table(tally: Tally) -> str:
    families: dict[str, list[Tried]] = {}
    for tried in tally.faults:
        families.setdefault(str(tried.trial.wants)[:3], []).append(tried)
    false_alarms = Counter(f.code[:3] for t in tally.twins for f in t.alarms)
    lines = ["family  planted  detected  right cause  right line  steps until  at end  false alarms  wall s"]
    lines += [_line(family, families.get(family, []), false_alarms[family]) for family in sorted(set(families) | set(false_alarms))]
    lines.append(_line("all", tally.faults, sum(false_alarms.values()), tally.wall_s))
    lines += ["", f"{len(tally.twins)} healthy scenarios, {sum(not t.alarms and not t.exit_code for t in tally.twins)} of them sane"]
    lines += [f"wrong: {line}" for line in tally.wrong]
    lines += [
        "",
        "verdict     "
        f"{'every fault named, no false alarm' if not tally.wrong else f'{len(tally.wrong)} wrong'}, exit code {1 if tally.wrong else 0}",
    ]
    return "\n".join(lines)


def _line(family: str, group: list[Tried], false_alarms: int, wall_s: float | None = None) -> str:
    """Steps until detected: the median, and the most, of those that were told while the run went on; the others were told at its end."""
    onsets = sorted(t.onset_steps for t in group if t.onset_steps is not None)
    at_end = sum(t.detected and t.onset_steps is None for t in group)
    steps = f"{onsets[len(onsets) // 2]} to {onsets[-1]}" if onsets else "-"
    return (
        f"{family:6s}  {len(group):7d}  {sum(t.detected for t in group):8d}  {sum(t.right_cause for t in group):11d}  "
        f"{sum(t.right_cause and t.right_line for t in group):10d}  {steps:>11s}  {at_end:6d}  {false_alarms:12d}  "
        f"{sum(t.wall_s for t in group) if wall_s is None else wall_s:6.1f}"
    )


def _plain(tally: Tally) -> dict[str, Any]:
    return {
        "version": 1,
        "wall_s": round(tally.wall_s, 2),
        "faults": [
            {"name": t.trial.name, "wants": t.trial.wants, "found": [f.code for f in t.alarms], "right_cause": t.right_cause,
             "right_line": t.right_line, "wall_s": round(t.wall_s, 2), "steps": t.num_steps, "steps_until": t.onset_steps} for t in tally.faults
        ],
        "healthy": [_healthy(t, tally.unchecked.get(t.trial.name, [])) for t in tally.twins],
        "wrong": tally.wrong,
    }  # fmt: skip


def _healthy(tried: Tried, unchecked: list[str]) -> dict[str, Any]:
    found = [f.code for f in tried.alarms]
    return {"name": tried.trial.name, "found": found, "exit_code": tried.exit_code, "unchecked": unchecked, "wall_s": round(tried.wall_s, 2)}


def _entry(planted: Planted) -> dict[str, Any]:
    return {"name": planted.full_name, "finds": planted.finds, "lines": list(planted.lines or ()), "story": planted.story}


def _listing(planted: list[Planted]) -> str:
    return "\n".join(f"{p.finds}  {p.full_name:48s} {p.story}" for p in planted)
