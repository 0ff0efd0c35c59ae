"""What `harness run` does: plans and refuses, then a session, then the outputs. Apart from run.py, which `harness --help` imports."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import rundir
from harness.commands._options import flags_of
from harness.commands._output import Target, as_json, console_on_stdout, emit, targets, write_file
from harness.errors import UsageError, first_by_precedence


def run_scripts(args: argparse.Namespace) -> int:
    from harness import catalog
    from harness.planning import clean_environment
    from harness.settings import resolve

    if not args.scripts:
        raise UsageError("no script named; give a scenario (harness list shows them), a path, or all")
    cwd = Path.cwd()
    stale = clean_environment(os.environ)
    general = resolve(flags_of(args), os.environ, cwd)
    wanted = targets(general["format"], "run")
    scenarios = catalog.find(args.scripts, cwd)
    script_args = args.script_args or []
    if script_args and len(scenarios) > 1:
        raise UsageError(f"arguments after -- go to one script, but {len(scenarios)} are named; run them one by one")
    if general["launcher"] == "inline" and not console_on_stdout(wanted):
        raise UsageError("--launcher inline gives standard output to the script; write the report into a file: --format json=FILE")
    if general["out"] is not None and len({s.name for s in scenarios}) < len(scenarios):
        raise UsageError("--out takes one folder a script name, but two scripts bear the same name; run them one by one")
    jobs = [job_of_script(scenario, args, script_args, cwd, several=len(scenarios) > 1) for scenario in scenarios]
    if args.dry_run:
        return _dry_run(jobs, wanted)
    if args.detach and any(job.plan.launcher != "slurm" or job.plan.slurm.allocation for job, _ in jobs):
        raise UsageError("--detach leaves a job of its own alone, so it needs --launcher slurm, outside an allocation")
    on_slurm = [job for job, _ in jobs if job.plan.launcher == "slurm"]
    if on_slurm:
        require_slurm()
    for job in on_slurm:
        _check_run_folder(cwd / (job.settings["out"] or ".harness"))
    return _run(jobs, wanted, cwd, stale, args.detach)


def require_slurm() -> None:
    import shutil

    missing = [name for name in ("sbatch", "srun", "scontrol") if shutil.which(name) is None]
    if missing:
        raise UsageError(
            f"--launcher slurm needs Slurm's commands, and {', '.join(missing)} cannot be found; "
            "scripts/slurm-dev-cluster makes a cluster on this machine to try it"
        )


def _check_run_folder(folder: Path) -> None:
    """Slurm and submitit take these for marks of their own, wherever in the path of the job's log they stand."""
    import re

    mark = re.search(r"\\|%%|%[0-9]*[AabJjNnstux]", str(folder))
    if mark is not None:
        raise UsageError(f"--launcher slurm: the run folder {folder} holds {mark[0]}, which Slurm or submitit replaces; name another one with --out")


def job_of_script(
    scenario: Any, args: argparse.Namespace, script_args: list[str], cwd: Path, *, several: bool, environ: Mapping[str, str] = os.environ
) -> Any:
    """(job, judging) of one script; every refusal happens here, before anything is started."""
    from harness import catalog, replay
    from harness.planning import expand_codes, make_job
    from harness.settings import resolve
    from harness.suppress import comments_in

    flags = flags_of(args)
    source = catalog.read_script(cwd / scenario.path)
    header = catalog.parse_block(source, scenario.path).table
    settled = resolve(flags, environ, cwd, header, f"header of {scenario.path}")
    if several and settled["out"] is not None:
        settled = settled.with_value("out", str(Path(settled["out"]) / scenario.name))
    job = make_job(scenario, settled, script_args, cwd, environ)
    known = replay.check_names() if settled["select"] or settled["ignore"] else {}
    select = tuple(sorted(expand_codes(settled["select"], known, settled.origin("select"))))
    ignore = {word: tuple(sorted(expand_codes([word], known, settled.origin("ignore")))) for word in settled["ignore"]}
    return job, replay.Judging(select, ignore, settled["fail_on"], comments_in(source))


def _run(jobs: list[Any], wanted: list[Target], cwd: Path, stale: list[str], detach: bool) -> int:
    from harness.launch import driver
    from harness.report import console, live
    from harness.session import Session
    from harness.watch.view import View

    _claim_files(wanted, [cwd / job.settings["out"] for job, _ in jobs if job.settings["out"] is not None])
    on_stdout = console_on_stdout(wanted)
    is_tty = sys.stdout.isatty()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    style = console.style_for(os.environ, is_tty)
    screen = live.Live(sys.stdout if on_stdout else None, style, animate=live.animated(os.environ, is_tty), cwd=str(cwd))
    if stale:
        screen.note(f"left by another job and not passed on: {', '.join(stale)}")
    local = driver.Supervisor()
    on_slurm = [job for job, _ in jobs if job.plan.launcher == "slurm"]
    queue = _slurm_queue(local, screen, cwd / (on_slurm[0].settings["out"] or ".")) if on_slurm else None
    session = Session(screen, local, driver.command, View, cwd, slurm=queue, detach=detach)
    session.while_loading = lambda: _look_around(screen, jobs)
    results = session.run(jobs)
    code = first_by_precedence([*(r.verdict.exit_code for r in results), *([session.interrupts.code] if session.interrupts.code else [])])
    if len(results) > 1:
        screen.block(console.closing([r.verdict for r in results], code, style))
    _emit_files(results, wanted, code, cwd)
    return code


def _claim_files(wanted: list[Target], run_folders: list[Path]) -> None:
    """A place that cannot be written is refused before the run, not after it. A file beside the run's own waits until that folder is made, empty."""
    folders = [Path(os.path.abspath(folder)) for folder in run_folders]  # noqa: PTH100  (as rundir takes them: no link is followed)
    for target in wanted:
        if target.file is None:
            continue
        file = Path(os.path.abspath(target.file))  # noqa: PTH100
        if file.parent in folders and file.name in rundir.OWN_FILES:
            raise UsageError(f"--format {target.kind}={target.file}: the run folder has a {file.name} of its own; name another file")
        if file.parent in folders or any(file.parent in folder.parents and not file.parent.exists() for folder in folders):
            continue
        write_file(target, "")


def follow_run(folder: Any, wanted: list[Target], cwd: Path, *, cancel: bool) -> int:
    """`harness attach`: a session that submits nothing."""
    from harness.launch import driver
    from harness.launch.slurm import SlurmLauncher
    from harness.report import console, live
    from harness.session import Session
    from harness.watch.view import View

    require_slurm()
    is_tty = sys.stdout.isatty()
    style = console.style_for(os.environ, is_tty)
    screen = live.Live(sys.stdout if console_on_stdout(wanted) else None, style, animate=live.animated(os.environ, is_tty), cwd=str(cwd))
    local = driver.Supervisor()
    session = Session(screen, local, driver.command, View, cwd, slurm=SlurmLauncher(local))
    if cancel:
        session.interrupts.signal, session.interrupts.again = signal.SIGINT, True
    result = session.attach(folder)
    _emit_files([result], wanted, result.verdict.exit_code, cwd)
    return int(result.verdict.exit_code)


def _look_around(screen: Any, jobs: list[Any]) -> None:
    """The lines of `harness doctor` that cost next to nothing; what is well is not said."""
    from harness.doctor.line import OK, Host, examine
    from harness.launch import slurm_shared

    plan = max((job.plan for job, _ in jobs), key=lambda plan: plan.nproc)
    for line in examine(Host(plan.nproc, plan.nodes, slurm_shared.cluster_is_here(plan.nodes)), quick_only=True):
        if line.level != OK:
            screen.note(f"{line.name}: {line.says}" + (f"; {line.fix}" if line.fix else "") + " (harness doctor tells more)")


def _slurm_queue(local: Any, screen: Any, place: Path) -> Any:
    """The launcher of a cluster; says at once where its nodes may not see the run folder."""
    from harness.launch import slurm_shared
    from harness.launch.slurm import SlurmLauncher

    if doubt := slurm_shared.doubt(place):
        screen.note(doubt)
    return SlurmLauncher(local)


def _emit_files(results: list[Any], wanted: list[Target], code: int, cwd: Path) -> None:
    from harness.report import json as report_json
    from harness.report import junit

    reports = [result.report for result in results]
    rest = [t for t in wanted if t != Target("console", None)]
    emit(
        rest,
        {
            "console": lambda: "\n".join(result.plain_text for result in results),
            "json": lambda: as_json(report_json.session(reports, code)),
            "junit": lambda: junit.render(reports),
        },
    )


def _dry_run(jobs: list[Any], wanted: list[Target]) -> int:
    from harness.launch import driver

    entries = []
    for job, _ in jobs:
        plan = job.plan
        folder = Path(job.settings["out"] or Path(".harness") / f"STAMP-{plan.scenario.name}")
        try:
            argv, env = driver.command(plan, Path(plan.cwd) / folder)
        except ValueError as error:
            raise UsageError(str(error)) from None
        env = _with_threads(plan, env)
        entry = {"name": plan.scenario.name, "cwd": plan.cwd, "command": argv, "env": env, "script_args": list(plan.script_args)}
        if job.reference is not None:
            argv, env = driver.command(job.reference, Path(plan.cwd) / folder / rundir.REFERENCE_DIR)
            entry["reference"] = {"command": argv, "env": env, "script_args": list(job.reference.script_args)}
        entries.append(entry)
    _add_batches(jobs, entries)
    emit(wanted, {"console": lambda: _dry_text(entries), "json": lambda: as_json(entries), "junit": _no_junit})
    return 0


def _with_threads(plan: Any, env: dict[str, str]) -> dict[str, str]:
    """Warm servers get for several ranks what the real torchrun sets by itself: one thread each."""
    alone = plan.launcher != "warm" or plan.nproc == 1 or "OMP_NUM_THREADS" in os.environ
    return env if alone else {"OMP_NUM_THREADS": "1", **env}


def _add_batches(jobs: list[Any], entries: list[dict[str, Any]]) -> None:
    """The batch script that would be submitted, at the first run of those that share it; `array`: the run's number in it."""
    from harness.launch import slurm_jobs, slurm_layout

    places = {id(job.plan): (job, entry) for (job, _), entry in zip(jobs, entries, strict=True)}
    for plans in slurm_jobs.grouped([job.plan for job, _ in jobs if job.plan.slurm is not None and not job.plan.slurm.allocation]):
        job, first = places[id(plans[0])]
        folder = Path(first["command"][-1]).parent
        with_reference = any(places[id(plan)][0].reference is not None for plan in plans)
        first["batch"] = slurm_layout.text(plans, folder, with_reference)
        first["node_command"] = slurm_layout.node_command(plans[0], folder.parent)
        first["overridden"] = slurm_layout.overridden(job.plan, os.environ)
        for number, plan in enumerate(plans if len(plans) > 1 else ()):
            places[id(plan)][1]["array"] = number


def _no_junit() -> str:
    raise UsageError("--dry-run starts nothing, so there is no junit of it; take console or json")


def _batch_lines(entry: dict[str, Any]) -> list[str]:
    import shlex

    script = entry["command"][-1]
    said = [f"# {variable} of your environment wins over --{option} below" for option, variable in sorted(entry["overridden"].items())]
    return [
        f"# {entry['name']}: each task loads submitit's pickle, which holds this command",
        f"#   {shlex.join(entry['node_command'])}",
        *said,
        f"cd {shlex.quote(entry['cwd'])} && {shlex.join(entry['command'])}",
        f"# {script}",
        entry["batch"],
    ]


def _dry_text(entries: list[dict[str, Any]]) -> str:
    import shlex

    lines: list[str] = []
    for entry in entries:
        if "array" in entry:
            lines.append(f"# {entry['name']} is element {entry['array']} of the array")
        if "batch" in entry:
            lines += _batch_lines(entry)
        if "batch" in entry or "array" in entry:
            continue
        lines += [f"# {entry['name']}", f"cd {shlex.quote(entry['cwd'])}", *_command_lines(entry)]
        if "reference" in entry:
            lines += ["# its reference run, after it", *_command_lines(entry["reference"])]
    return "\n".join(lines)


def _command_lines(entry: dict[str, Any]) -> list[str]:
    import shlex

    return [*(f"export {name}={shlex.quote(value)}" for name, value in sorted(entry["env"].items())), shlex.join(entry["command"]), ""]
