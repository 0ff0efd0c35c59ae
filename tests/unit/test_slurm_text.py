"""What Slurm is asked for: the exact text, from pure functions. Needs no Slurm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.launch import slurm, slurm_jobs, slurm_layout, slurm_options, slurm_text
from harness.model import Plan, Scenario, Slurm

GOLDEN = Path(__file__).parents[1] / "golden"
FULL = Slurm(
    options={"partition": "gpu", "account": "proj42", "exclusive": "", "comment": "it's \"a\" 100 % Käse"},
    setup=("module load cuda/12.4",),
    cpus_per_rank=3,
)
PLAN = Plan(
    "abc", Scenario("träin me", "./train.py"), ("--lr", "0.1"), 2, nodes=2, launcher="slurm", cwd="/shared/me", python="/opt/my py/bin/python",
    slurm=FULL, timeout_s=600.0,
)  # fmt: skip
RUN = Path("/shared/me/.harness/a b'c")


def test_the_batch_script_is_what_the_golden_file_says() -> None:
    text = slurm_layout.text([PLAN], slurm_layout.submission_dir(RUN), with_reference=True)
    assert text == (GOLDEN / "sbatch.sh").read_text("utf-8")


def test_an_array_names_its_elements_and_takes_the_longest_time() -> None:
    plans = [PLAN, replace(PLAN, timeout_s=1200.0), PLAN]
    plans = [replace(plan, slurm=replace(FULL, parallel=2)) for plan in plans]
    lines = slurm_layout.text(plans, RUN).splitlines()
    assert "#SBATCH --array=0-2%2" in lines and "#SBATCH --output=job-%A_%a.log" in lines and "#SBATCH --time=25" in lines


def test_one_rank_a_task_asks_for_as_many_tasks_as_ranks() -> None:
    plan = replace(PLAN, device="cuda", slurm=Slurm(ranks="task", gpus="task"))
    wanted = slurm_layout.options(plan)
    assert (wanted["ntasks-per-node"], wanted["cpus-per-task"], wanted["gpus-per-task"]) == ("2", "1", "1")
    assert slurm_layout.num_agents(plan) == 4
    assert "--ntasks=4" in slurm_layout.srun_arguments(plan)


def test_an_agent_a_node_sees_all_gpus_of_the_job_there() -> None:
    wanted = slurm_layout.options(replace(PLAN, device="cuda"))
    assert (wanted["gpus-per-node"], wanted["ntasks-per-node"], wanted["cpus-per-task"]) == ("2", "1", "6")
    own = slurm_layout.options(replace(PLAN, device="cuda", slurm=Slurm(options={"gres": "gpu:a100:2"})))
    assert "gpus-per-node" not in own and own["gres"] == "gpu:a100:2"


def test_partition_and_account_are_never_asked_for_by_ourselves() -> None:
    assert {"partition", "account", "qos"} & set(slurm_layout.options(replace(PLAN, slurm=Slurm()))) == set()


def test_the_time_lies_behind_our_own_limit_and_the_users_wins() -> None:
    assert slurm_layout.options(replace(PLAN, slurm=Slurm()))["time"] == "15"
    assert slurm_layout.options(replace(PLAN, slurm=Slurm(options={"time": "2-00"})))["time"] == "2-00"


def test_cpus_a_task_reach_srun_too() -> None:
    assert "--cpus-per-task=9" in slurm_layout.srun_arguments(replace(PLAN, slurm=Slurm(options={"cpus-per-task": "9"})))


def test_inside_an_allocation_it_is_a_step() -> None:
    plan = replace(PLAN, slurm=Slurm(allocation="77"))
    argv = slurm.command(plan, RUN).argv
    assert argv[:2] == ("srun", "--jobid=77")
    assert argv[-4:] == ("/opt/my py/bin/python", "-I", str(slurm_layout.LAUNCH_DIR / "slurm_node.py"), str(RUN))


def test_a_bare_script_holds_nothing_of_ours() -> None:
    text = slurm_layout.bare_text(replace(PLAN, scenario=Scenario("train", "my train.py"), slurm=Slurm()))
    assert "harness run" not in text and "_submit" not in text
    step = next(line for line in text.splitlines() if line.startswith("srun"))
    assert step.endswith("--rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$head:$port 'my train.py' --lr 0.1")


def test_runs_of_one_shape_share_an_array() -> None:
    other = replace(PLAN, run_id="d", scenario=Scenario("b", "b.py"), timeout_s=9.0)
    wider = replace(PLAN, run_id="e", nproc=4)
    assert slurm_jobs.grouped([PLAN, wider, other]) == [[PLAN, other], [wider]]


@pytest.mark.parametrize("name", ["a\nb", "é ' \" $(x)", "", "x" * 300, "--wrap=rm"])
def test_a_job_name_is_one_plain_word(name: str) -> None:
    made = slurm_text.job_name(name)
    assert made.startswith("harness-") and len(made) <= 48 and made.isascii() and not set(made) & set(" '\"$\n")


def test_a_value_cannot_begin_a_new_line() -> None:
    assert slurm_text.flag("comment", "a\n#SBATCH --wrap=x") == "--comment='a #SBATCH --wrap=x'"


def test_variables_of_the_user_that_win_are_said() -> None:
    environ = {"SBATCH_TIMELIMIT": "5", "SBATCH_PARTITION": "x", "SBATCH_ACCOUNT": "y", "SBATCH_QOS": "z"}
    assert slurm_layout.overridden(PLAN, environ) == {"time": "SBATCH_TIMELIMIT", "partition": "SBATCH_PARTITION", "account": "SBATCH_ACCOUNT"}
    typed = replace(PLAN, slurm=replace(FULL, explicit=("partition",)))
    assert "partition" not in slurm_layout.overridden(typed, environ)


# ---- what the user says


def made(*words: str, profile: dict[str, object] | None = None) -> Slurm:
    return slurm_options.make(words, profile or {}, "--slurm", None, "")


def test_keys_and_raw_flags_reach_sbatch() -> None:
    slurm_ = made("partition=gpu", "--exclusive", "--gres=gpu:a100:2", "-A proj", "mem_per_cpu=4G")
    assert slurm_.options == {"partition": "gpu", "exclusive": "", "gres": "gpu:a100:2", "account": "proj", "mem-per-cpu": "4G"}
    assert slurm_.explicit == ("partition", "exclusive", "gres", "account")  # what was typed as a key is known by sbatch's name


def test_a_profile_holds_what_a_cluster_needs_and_what_is_typed_wins() -> None:
    profile = {"partition": "cpu", "modules": ["gcc", "cuda/12"], "setup": "source env.sh", "ranks": "task", "flags": ["--exclusive"], "requeue": True}
    slurm_ = made("partition=gpu", profile=profile)
    assert slurm_.options == {"partition": "gpu", "exclusive": "", "requeue": ""}
    assert slurm_.setup == ("module load gcc || exit 1", "module load cuda/12 || exit 1", "source env.sh")
    assert slurm_.ranks == "task"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("partitoin=x", "did you mean partition"),
        ("nodes=3", "--nodes says"),
        ("--ntasks=3", "-n and --nodes says"),
        ("exclusive", "--slurm=--exclusive"),
        ("ranks=both", "agent or task"),
        ("cpus-per-rank=0", "1 or more"),
        ("-Z", "long form"),
    ],
)
def test_a_slip_is_found_before_anything_is_submitted(word: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        made(word)


def test_a_profile_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean alpha"):
        slurm_options.profile_of({"alpha": {}}, "alpah", "--site")
    assert slurm_options.profile_of({"default": {"partition": "x"}}, None, "default") == {"partition": "x"}
    assert slurm_options.profile_of({"alpha": {}}, None, "default") == {}


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "12"}, "12"),
        ({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}, ""),
        ({"SLURM_JOB_ID": "x; rm"}, ""),
    ],
)
def test_an_allocation_is_one_that_has_room_for_a_step(environ: dict[str, str], job: str) -> None:
    assert slurm_options.allocation_of(environ) == job
