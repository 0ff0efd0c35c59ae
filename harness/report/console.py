"""What the user reads at the end of a run. Pure: a Run and a Verdict in, text out; colours only by `Style`.

Everything foreign is passed through `text.clean`; a script's own lines always bear a prefix, so none can pass for a line of ours.
"""

from __future__ import annotations

import os
import shlex
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import __version__
from harness.model import Finding, OutcomeKind, Plan, Severity, Verdict
from harness.record import Run
from harness.report import figures
from harness.report.failure import failure_lines
from harness.report.figures import RankFigures
from harness.report.text import clean, count, duration, gist, number, one_line, ranks_phrase, rate, share, size, source_line
from harness.report.verdict import word_of

WIDTH = 118
MAX_TABLE_RANKS = 16
CODES = {"red": "31", "yellow": "33", "cyan": "36", "green": "32", "bold": "1", "dim": "2"}
COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.ADVICE: "cyan"}


@dataclass(frozen=True)
class Style:
    """Whether colours are written."""

    colour: bool = False

    def paint(self, text: str, *names: str) -> str:
        if not self.colour or not text:
            return text
        return f"\x1b[{';'.join(CODES[n] for n in names)}m{text}\x1b[0m"


def style_for(environ: Mapping[str, str], is_tty: bool) -> Style:
    """NO_COLOR (set to anything but nothing) wins, then FORCE_COLOR, then whether it is a terminal that can."""
    if environ.get("NO_COLOR"):
        return Style(False)
    if environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return Style(True)
    return Style(is_tty and environ.get("TERM", "") != "dumb")


# ---- the header, before the run


def header(plan: Plan, style: Style) -> str:
    """What runs, said before it runs; the rest is known at the end only."""
    world = f"{plan.nodes} x {plan.nproc}" if plan.nodes > 1 else str(plan.nproc)
    facts = [f"{world} rank{'s' * (plan.world_size > 1)}", f"launcher {plan.launcher}", f"device {plan.device}"]
    if plan.backend != "auto":
        facts.append(f"backend {plan.backend}")
    line = one_line(f"harness {__version__}: {plan.scenario.name} ({', '.join(facts)})")
    call = " ".join([shown_path(plan.scenario.path, plan.cwd), *plan.script_args])
    return style.paint(line, "bold") + "\n" + style.paint(f"  {one_line(call, 300)}", "dim")


# ---- findings


def finding_lines(finding: Finding, style: Style, cwd: str = "") -> list[str]:
    """One finding, as a compiler prints it."""
    head = style.paint(f"{finding.severity.word}[{finding.code}]", COLOURS[finding.severity], "bold")
    lines = [f"{head}: {finding.name}: {one_line(finding.message)}"]
    ranks = ranks_phrase(finding.ranks)
    if finding.where is not None:
        place = f"{shown_path(one_line(finding.where.file), cwd)}:{finding.where.line}"
        lines.append(f"  --> {place}{f' ({ranks})' if ranks else ''}")
        if finding.where.text:
            lines.append(f"   |  {source_line(finding.where.text)}")
    elif ranks:
        lines.append(f"  --> {ranks}")
    lines += [f"   = note: {one_line(note)}" for note in finding.notes]
    if finding.help:
        lines.append(f"   = help: {one_line(finding.help)}")
    if finding.consequences:
        lines.append(f"   = note: explains {', '.join(finding.consequences)}")
    return lines


def shown_path(path: str, cwd: str) -> str:
    """Relative where it lies below the folder of the run, as compilers do."""
    if cwd and path.startswith(cwd.rstrip(os.sep) + os.sep):
        return path[len(cwd.rstrip(os.sep)) + 1 :]
    return path


# ---- the per-rank table

COLUMNS = ("rank", "steps", "last loss", "peak RSS", "step p50", "step p95", "samples/s", "data")


def table_lines(ranks: Sequence[RankFigures], style: Style) -> list[str]:
    chosen = _chosen(ranks)
    cuda = any(r.peak_cuda_bytes for r in ranks)
    heads = [*COLUMNS[:4], *(["peak CUDA"] if cuda else []), *COLUMNS[4:]]
    rows = [_cells(r, cuda) for r in chosen]
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    lines = [style.paint("  ".join(h.rjust(w) for h, w in zip(heads, widths, strict=True)), "dim")]
    lines += ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(chosen) < len(ranks):
        lines.append(f"... {len(ranks) - len(chosen)} more ranks in report.json; shown are the first, the slowest and the largest")
    return lines


def _cells(r: RankFigures, cuda: bool) -> list[str]:
    if not r.reported:
        return [str(r.rank), "did not report", *[""] * (len(COLUMNS) - 2 + cuda)]
    extra = [size(r.peak_cuda_bytes)] if cuda else []
    return [
        str(r.rank), str(r.num_steps), number(r.last_loss), size(r.peak_rss_bytes), *extra,
        duration(r.step_p50_s), duration(r.step_p95_s), rate(r.samples_per_s), share(r.data_share),
    ]  # fmt: skip


def _chosen(ranks: Sequence[RankFigures]) -> list[RankFigures]:
    """All ranks of a small job; of a large one the first, those that did not report, the slowest and the largest."""
    if len(ranks) <= MAX_TABLE_RANKS:
        return list(ranks)
    quarter = MAX_TABLE_RANKS // 4
    picked = [*ranks[:quarter], *[r for r in ranks if not r.reported][:quarter]]
    picked += sorted(ranks, key=lambda r: -(r.step_p50_s or 0.0))[:quarter]
    picked += sorted(ranks, key=lambda r: -(r.peak_rss_bytes or 0))[:quarter]
    return sorted(set(picked), key=lambda r: r.rank)


# ---- one line each for loss, memory and throughput


def summary_lines(verdict: Verdict, run: Run) -> list[str]:
    loss, memory, speed = (verdict.summary.get(key) or {} for key in ("loss", "memory", "throughput"))
    steps = verdict.summary.get("num_steps") or 0
    if not steps:
        return [f"{'training':12}{_own_processes(run)}"]
    lines = [("loss", f"none seen in {count(steps, 'step')}")]
    if loss.get("first") is not None:
        lines = [("loss", f"{number(loss['first'])} -> {number(loss['last'])} over {count(steps, 'step')} (mean over ranks)")]
        if loss.get("reference_last") is not None:
            lines = [("loss", f"{lines[0][1]}; the reference ends at {number(loss['reference_last'])}")]
    lines += [("memory", _memory_line(memory)), ("throughput", _speed_line(speed, run))]
    return [f"{name:12}{value}" for name, value in lines]


def _own_processes(run: Run) -> str:
    """What is known where no rank takes a step: workers of the script's own may (hogwild)."""
    workers = figures.workers(run)
    if not workers:
        return "no step was seen"
    line = f"{count(sum(w.num_steps for w in workers), 'step')} in {count(len(workers), 'process')} of the script's own"
    losses = [(w.first_loss, w.last_loss) for w in workers if w.first_loss is not None and w.last_loss is not None]
    means = [sum(column) / len(losses) for column in zip(*losses, strict=True)]
    return line + (f", loss {number(means[0])} -> {number(means[1])} (mean over them)" if means else "")


def _memory_line(memory: Mapping[str, float | int | None]) -> str:
    if memory.get("peak_rss_bytes") is None:
        return "not measured"
    line = f"peak {size(memory['peak_rss_bytes'])} resident (rank {memory['peak_rss_rank']})"
    line += f", {size(memory['sum_peak_rss_bytes'])} over all ranks"
    return line + (f", peak {size(memory['peak_cuda_bytes'])} on a GPU" if memory.get("peak_cuda_bytes") else "")


def _speed_line(speed: Mapping[str, float | None], run: Run) -> str:
    if speed.get("step_p50_s") is None:
        return f"too few steps to time (fewer than {figures.MIN_TIMED} behind the warm-up)"
    line = f"{rate(speed['samples_per_s'])} samples/s, " if speed.get("samples_per_s") is not None else ""
    if speed.get("samples_per_step") is not None and run.world_size > 1:
        line += f"{speed['samples_per_step']:,.0f} a step over {count(run.world_size, 'rank')}, "
    line += f"step p50 {duration(speed['step_p50_s'])}, p95 {duration(speed['step_p95_s'])} after warm-up"
    line += f", {share(speed['data_share'])} waiting for data"
    if speed.get("speedup") is not None and run.reference is not None:
        line += f", {speed['speedup']:.2f}x the reference of {count(run.reference.world_size, 'process')}"
        line += f" on {count(run.num_cores, 'core')}"
    return line


def _missed_lines(verdict: Verdict) -> list[str]:
    """A silent sensor makes a clean verdict say less: it is told."""
    probe = verdict.summary.get("probe") or {}
    if not probe.get("num_errors"):
        return []
    return [f"{'probe':12}failed {probe['num_errors']} times at least, so checks may have missed things; first in {gist(str(probe['first_error']), 200)}"]


def _left_lines(run: Run) -> list[str]:
    """What was looked for behind the last rank, and what was found there: said after every run, also a good one."""
    ending = run.ending
    if run.live or not ending.started:
        return []
    own = {rank for rank, recording in enumerate(run.ranks) if recording is not None and recording.role == "child"}  # the script ends those itself
    untold = sorted(set(range(run.world_size)) - own - {e.rank for e in ending.exits})
    if ending.left_behind:
        said = one_line("; ".join(ending.left_behind), 300)
    elif untold:
        said = f"not known: nobody told of the end of {ranks_phrase(untold)}"
    else:
        said = "nothing: no process, port or shared memory of this run"
    return [f"{'left behind':12}{said}"]


# ---- what was not judged


def not_judged_lines(verdict: Verdict, style: Style) -> list[str]:
    """Every check that did not run, grouped by its reason."""
    lines: list[str] = []
    for kind, title in (
        (OutcomeKind.CRASHED, "crashed (a bug of harness)"),
        (OutcomeKind.INCONCLUSIVE, "inconclusive"),
        (OutcomeKind.NOT_APPLICABLE, "not applicable"),
        (OutcomeKind.DESELECTED, "deselected"),
    ):
        groups: dict[str, list[str]] = {}
        for outcome in verdict.outcomes:
            if outcome.kind is kind:
                groups.setdefault(gist(outcome.reason, 200) or "no reason given", []).append(outcome.code)
        if groups:
            num = sum(map(len, groups.values()))
            lines.append(style.paint(f"{title}: {num} check{'s' if num > 1 else ''}", "dim"))
            entries = [
                f"{reason} ({', '.join(code_ranges(codes))})" if kind is not OutcomeKind.DESELECTED else ", ".join(code_ranges(codes))
                for reason, codes in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
            ]
            paragraphs = ["; ".join(entries)] if kind is OutcomeKind.NOT_APPLICABLE else entries
            if kind is OutcomeKind.NOT_APPLICABLE and num > MANY:
                paragraphs = [_by_family([c for codes in groups.values() for c in codes])]
            for text in paragraphs:
                lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ", break_long_words=False)
    return lines + suppression_lines(verdict)


MANY = 24  # of a hundred checks or more most do not apply to any one script: their reasons would take a third of the lines


def _by_family(codes: Sequence[str]) -> str:
    families = Counter(code[:3] for code in codes)
    told = ", ".join(f"{family} {num}" for family, num in sorted(families.items()))
    return f"{told}; the reason of each is in report.json, and `harness report --select {min(codes)}` tells one"


def code_ranges(codes: Sequence[str]) -> list[str]:
    """SYN121, SYN122, SYN123 -> SYN121-123; the codes of a report are in order."""
    found: list[tuple[str, int, int]] = []
    for code in codes:
        family, number = code[:3], int(code[3:])
        if found and found[-1][0] == family and found[-1][2] == number - 1:
            found[-1] = (family, found[-1][1], number)
        else:
            found.append((family, number, number))
    return [f"{family}{first}" if first == last else f"{family}{first}-{last}" for family, first, last in found]


def suppression_lines(verdict: Verdict) -> list[str]:
    """What the user silenced, and what of it was in vain."""
    suppressed = verdict.summary.get("suppressed") or {}
    lines = [f"silenced: {', '.join(sorted(suppressed['silenced']))}"] if suppressed.get("silenced") else []
    return lines + [f"suppression that matched nothing, so it can go: {one_line(unused)}" for unused in suppressed.get("unused", ())]


# ---- the whole


def verdict_line(verdict: Verdict, style: Style) -> str:
    word = word_of(verdict)
    ran = sum(o.kind is OutcomeKind.RAN for o in verdict.outcomes)
    found = [count(n, s.word) if s is not Severity.ADVICE else f"{n} advice" for s in reversed(Severity) if (n := _num(verdict, s))]
    codes = list(dict.fromkeys(f.code for f in sorted(verdict.findings, key=lambda f: -f.severity)))
    detail = f"{', '.join(found)}: {', '.join(codes)}" if found else "no findings"
    so_far = "so far " if verdict.ending.reason == "running" else ""  # harness report on a run that goes on
    why = {
        "sane": f"sane {so_far}({count(ran, 'check')} ran, {detail})",
        "findings": f"not sane {so_far}({detail})",
        "failed": f"failed ({_how_failed(verdict)}; {detail})",
        "interrupted": f"interrupted, so not judged as a whole ({detail} so far)",
        "not launched": f"could not launch; no line of the script ran{_launcher_error(verdict)}",
        "nothing checked": "nothing was checked: " + _why_nothing(verdict),
    }.get(word, "internal error: a check of harness crashed; please report it")
    colour = "green" if word == "sane" else "yellow" if word in ("nothing checked", "interrupted") else "red"
    return f"{style.paint('verdict', 'bold')}     {style.paint(why, colour, 'bold')}, exit code {verdict.exit_code}"


def _num(verdict: Verdict, severity: Severity) -> int:
    return sum(f.severity is severity for f in verdict.findings)


def _how_failed(verdict: Verdict) -> str:
    ending = verdict.ending
    if ending.reason == "hang":
        return f"hung for {duration(ending.hang_after_s)}" if ending.hang_after_s else "hung"
    job = ending.scheduler
    if job is not None and (ending.reason == "scheduler" or (ending.reason == "timeout" and job.state in ("TIMEOUT", "DEADLINE"))):
        return f"Slurm ended job {job.job_id} as {job.state or 'gone'}"
    if ending.reason == "timeout":
        return f"ended at the limit of {duration(verdict.plan.timeout_s)}; raise it with --timeout"
    if ending.reason == "folder-deleted":
        return "ended because its run folder was deleted"
    failed = [e.rank for e in ending.exits if e.code != 0 and not e.by_us]
    return f"{ranks_phrase(failed)} failed" if failed else gist(ending.launcher_error)


def _launcher_error(verdict: Verdict) -> str:
    return f": {gist(verdict.ending.launcher_error)}" if verdict.ending.launcher_error else ""


def _why_nothing(verdict: Verdict) -> str:
    if verdict.ending.reason == "fail-fast":
        return "--fail-fast ended the run for a suspicion that its whole recording does not bear out; run it again without"
    if not any(o.kind in (OutcomeKind.INCONCLUSIVE, OutcomeKind.RAN) for o in verdict.outcomes):
        return "no check applied to this run"
    if not verdict.summary.get("num_steps"):
        return "no training step was seen"
    return "no check beyond launch and exit could judge"


def next_command(verdict: Verdict, folder: str) -> str:
    """The command that a user would want to type now."""
    plan, word, folder = verdict.plan, word_of(verdict), shlex.quote(folder)
    if verdict.findings:
        worst = max(verdict.findings, key=lambda f: f.severity)
        return f"harness explain {worst.code}"
    if word == "sane":
        return "harness run ./train.py -- ITS ARGUMENTS" if plan.scenario.builtin else f"harness report {folder} --format json"
    if word == "nothing checked":
        return "harness run ddp_cifar"
    if word == "not launched" and plan.launcher == "warm":
        return f"harness run {plan.scenario.name if plan.scenario.builtin else shlex.quote(plan.scenario.path)} --launcher torchrun"
    failed = [e.rank for e in verdict.ending.exits if e.code != 0 and not e.by_us]
    return f"less {folder}/logs/rank{failed[0]}.log" if failed and word == "failed" else f"harness report {folder}"


def _worlds_phrase(run: Run) -> str:
    judged = len(run.others) + 1
    each = f"{judged} of them judged" if run.num_unjudged else "each judged"
    which = "launched" if any(r.role == "main" for r in run.present) else "longest"
    return f"{judged + run.num_unjudged} process groups one after the other, {each}: the figures are those of the {which}"


def facts_line(run: Run) -> str:
    """What only the ranks could say."""
    seen = figures.versions(run)
    parts = [f"torch {one_line(str(seen['version']), 60)}"] if seen.get("version") else ["torch was not imported"]
    parts += [p for p in (figures.devices(run), figures.backend(run)) if p]
    reported = sum(r is not None for r in run.ranks)
    parts.append(f"{reported} of {count(run.world_size, 'rank')} reported")
    if run.others:
        parts.append(_worlds_phrase(run))
    return f"{'ran on':12}{', '.join(one_line(p, 120) for p in parts)}"


def render(run: Run, verdict: Verdict, folder: Path, cwd: str, style: Style) -> str:
    """Everything behind the script's own output."""
    blocks: list[list[str]] = []
    failure = failure_lines(run, verdict.findings)
    if failure:
        blocks.append([style.paint(failure[0], "red", "bold"), *failure[1:]])
    ordered = sorted(verdict.findings, key=lambda f: -f.severity)
    blocks += [finding_lines(f, style, cwd) for f in ordered]
    if run.num_steps:
        blocks.append(table_lines(figures.table(run), style))
    shown = shown_path(str(folder), cwd)
    last = [facts_line(run), *summary_lines(verdict, run), *_left_lines(run), *_missed_lines(verdict)]
    blocks.append(last)
    blocks.append(not_judged_lines(verdict, style))
    blocks.append([
        f"{'report':12}{shown}/report.json", verdict_line(verdict, style), f"{'next':12}{one_line(next_command(verdict, shown))}",
    ])  # fmt: skip
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def suspect_line(finding: Finding, style: Style, cwd: str) -> str:
    """A provisional finding while the script still runs; the verdict may fold it under a cause or drop it."""
    place = f" at {shown_path(one_line(finding.where.file), cwd)}:{finding.where.line}" if finding.where else ""
    return style.paint(
        f"suspect {finding.severity.word}[{finding.code}]: {finding.name}: {one_line(finding.message)}{place}", COLOURS[finding.severity]
    )


def script_line(rank: int, line: str, style: Style) -> str:
    return f"{style.paint(f'rank {rank} |', 'dim')} {clean(line).rstrip()}"


def closing(verdicts: Sequence[Verdict], exit_code: int, style: Style) -> str:
    """One line a script, where several ran."""
    width = max(len(v.plan.scenario.name) for v in verdicts)
    lines = [f"{v.plan.scenario.name:{width}}  {word_of(v):16} {', '.join(f.code for f in v.findings)}".rstrip() for v in verdicts]
    return style.paint(f"{len(verdicts)} scripts, exit code {exit_code}", "bold") + "\n" + "\n".join(f"  {line}" for line in lines) + "\n"
