"""Submits through submitit, in a process of its own: the controller never imports it. Reads a request from stdin, prints what came of it.

    request: {"folder": .., "text": .., "commands": [[argv], ..], "notes": [paths], "unset": [names]}     one command a job; several make an array
    answer:  {"jobs": ["123"]} or {"jobs": ["123_0", "123_1"]}, or {"error": "what sbatch said"}

submitit brings the pickles, their folder and the call of sbatch; the text is ours. Each pickle holds `os.execv` and a command line: the task's process
becomes our supervisor. Slurm signals the task's own process only, so a child of submitit's would never hear of scancel or of a time limit; and no
result is written that somebody could take for one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def submit(request: dict[str, Any]) -> list[str]:
    from submitit.core import utils
    from submitit.slurm.slurm import SlurmExecutor, SlurmJob

    class OurText(SlurmExecutor):
        def _make_submission_file_text(self, command: str, uid: str) -> str:
            return str(request["text"])

    folder = Path(request["folder"])
    os.chdir(folder)  # the job's own log is named relative to it, and Slurm remembers it: how a job is told from a later one of the same number
    executor = OurText(folder)
    calls = [utils.DelayedSubmission(os.execv, argv[0], list(argv)) for argv in request["commands"]]
    if len(calls) == 1:
        return [executor._internal_process_submissions(calls)[0].job_id]
    pickles = []
    for number, call in enumerate(calls):
        pickles.append(folder / f"call-{number}.pkl")
        call.dump(pickles[-1])
    first = executor._submit_command("")
    jobs: list[SlurmJob[Any]] = [SlurmJob(folder=folder, job_id=f"{first.job_id}_{number}", tasks=[0]) for number in range(len(calls))]
    for job, pickle in zip(jobs, pickles, strict=True):
        job.paths.move_temporary_file(pickle, "submitted_pickle")
    return [job.job_id for job in jobs]


def remember(jobs: list[str], request: dict[str, Any]) -> None:
    """Written here: the controller may have been killed by now, and `harness attach` has to find the job."""
    for job_id, note in zip(jobs, request["notes"], strict=True):
        path = Path(note)
        path.with_suffix(".new").write_text(json.dumps({"job_id": job_id, "folder": str(Path.cwd())}), "utf-8")
        path.with_suffix(".new").replace(path)


def main() -> None:
    request = json.loads(sys.stdin.read())
    for name in request["unset"]:
        os.environ.pop(name, None)
    os.umask(0o077)
    try:
        answer: dict[str, Any] = {"jobs": submit(request)}
        remember(answer["jobs"], request)
    except Exception as error:  # whatever submitit or sbatch say is the user's to read
        answer = {"error": str(error).strip() or repr(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
