"""What we take from submitit's inside, pinned: if a new version differs, this says so before a cluster does. Needs no Slurm."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

from harness.launch import slurm_jobs, slurm_submit, slurm_text

submitit_slurm = pytest.importorskip("submitit.slurm.slurm")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An sbatch that keeps what it is given and answers as Slurm does."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for name, body in (("srun", "exit 0"), ("sbatch", f'cp "$1" {tmp_path}/got.sh; pwd > {tmp_path}/cwd; echo "Submitted batch job 4711"')):
        path = bin_dir / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(bin_dir), prepend=":")
    folder = tmp_path / "run" / "slurm"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return folder


def test_the_command_of_a_task_is_submitits_own(cluster: Path) -> None:
    executor = submitit_slurm.SlurmExecutor(cluster, python=slurm_text.submitit_python("/my py"))
    ours = slurm_text.submitit_command("/my py", str(cluster), ["-n1"]).splitlines()
    assert ours[0] == "export SUBMITIT_EXECUTOR=slurm"
    assert ours[1] == f"srun --unbuffered -n1 {executor._submitit_command_str}"
    assert "export SUBMITIT_EXECUTOR=slurm" in inspect.getsource(submitit_slurm._make_sbatch_string)


def test_one_run_is_submitted_with_our_text(cluster: Path) -> None:
    request = {"folder": str(cluster), "text": "#!/bin/bash\n# ours\n", "commands": [["/bin/echo", "hi"]], "notes": [], "unset": []}
    assert slurm_submit.submit(request) == ["4711"]
    root = cluster.parents[1]
    assert (root / "got.sh").read_text() == "#!/bin/bash\n# ours\n"
    assert (root / "cwd").read_text().strip() == str(cluster)
    assert (cluster / "4711_submitted.pkl").is_file()


def test_an_array_has_one_pickle_an_element(cluster: Path) -> None:
    request = {"folder": str(cluster), "text": "x", "commands": [["a"], ["b"], ["c"]], "notes": [], "unset": []}
    assert slurm_submit.submit(request) == ["4711_0", "4711_1", "4711_2"]
    assert sorted(path.name for path in cluster.glob("*_submitted.pkl")) == [f"4711_{number}_submitted.pkl" for number in range(3)]


def test_an_interpreter_that_is_gone_is_told() -> None:
    assert "/no/such/python" in slurm_jobs.ask_submitit("/no/such/python", {})


def test_what_sbatch_says_against_it_comes_back(cluster: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import io
    import json

    (cluster.parents[1] / "bin" / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: nope' >&2\nexit 1\n")
    request = {"folder": str(cluster), "text": "x", "commands": [["a"]], "notes": [], "unset": ["SBATCH_PARTITION"]}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
    monkeypatch.setenv("SBATCH_PARTITION", "nope")
    slurm_submit.main()
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "invalid partition specified: nope" in answer["error"]


def test_a_pickle_holds_a_command_and_nothing_of_ours(cluster: Path) -> None:
    import pickletools

    slurm_submit.submit({"folder": str(cluster), "text": "x", "commands": [["/bin/true", "run"]], "notes": [], "unset": []})
    found = {str(arg) for op, arg, _ in pickletools.genops((cluster / "4711_submitted.pkl").read_bytes()) if op.name.endswith("UNICODE")}
    assert "execv" in found and not any("harness.launch" in text for text in found)


def test_the_job_is_noted_also_where_nobody_waits_for_the_answer(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller may have been killed while sbatch was at it."""
    import io
    import json

    notes = [cluster / f"job-{number}.json" for number in range(2)]
    request = {"folder": str(cluster), "text": "x", "commands": [["a"], ["b"]], "notes": [str(note) for note in notes], "unset": []}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
    monkeypatch.setattr(sys, "stdout", None)
    slurm_submit.main()
    assert [json.loads(note.read_text()) for note in notes] == [{"job_id": f"4711_{n}", "folder": str(cluster)} for n in range(2)]
