"""One Slurm task of a run: the supervisor of its node, with files in place of the pipe to the controller. Torch-free.

    slurm_node.py RUN_DIR

It owns the ranks as the local supervisor does (gang.py: TERM, grace, KILL, sweep), and besides: tells what it sees in `nodes/<K>.jsonl`, beats once a
second, obeys the controller's `control`, ends its ranks where another node's failed, keeps the run's wall limit when no controller looks on, takes
another port where the first was taken, and, as agent 0, makes the reference run after the run itself. SIGTERM from Slurm (scancel, time limit,
preemption) ends the ranks in order. See harness/attempt.py for the files.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import attempt, rundir
from harness.launch import job as wire
from harness.launch import silence, slurm_meet, spawn, warm
from harness.launch.command import AGENT_LOG, Command, Place, for_the_shim, python_of, rank_environment, script_path, shim
from harness.launch.gang import FOLDER_DELETED
from harness.launch.rank_shim import ENV_FIFO, FIFO
from harness.launch.slurm_layout import num_agents, settings_of
from harness.launch.slurm_meet import Endpoint
from harness.launch.slurm_pulse import Pulse
from harness.launch.supervisor import ENDING_S, Supervisor
from harness.model import Plan
from harness.probe import protocol

SLURM_GRACE_S = 3.0  # Slurm's own KillWait is 30 s at most sites, but may be as short as 5
LINGER_S = 10.0  # a failed task that leaves makes srun kill the others: they get the time to end in order
LIMIT_SLACK_S = 15.0  # the controller ends a run at its limit; we do where none looks on
PORT_TAKEN = ("EADDRINUSE", "address already in use", "Address already in use")
MAX_TRIES = 4
BY_SLURM, BY_PEER, RETRY = "slurm", "peer", "retry"


class Node(Supervisor):
    def __init__(self, run_dir: Path, plan: Plan) -> None:
        super().__init__(())
        self.env = os.environ
        self.plan, self.run_dir = plan, run_dir
        self.agent = int(self.env.get("SLURM_PROCID", "0"))
        self.restarts = int(self.env.get("SLURM_RESTART_COUNT", "0") or 0)
        self.num_agents = num_agents(plan)
        self.private = Path(tempfile.mkdtemp(prefix="harness-"))  # on the node: a FIFO is a node's own
        self.ending: dict[str, Any] | None = None
        self.exit_code = 1
        self._endpoint: Endpoint | None = None
        self._failed_rank = False
        self._launched_at: float | None = None
        self._linger_until = 0.0
        self._in_reference = False
        self._log_at = 0
        self._folder = run_dir
        self._unsaid = b""
        self._enter(run_dir)
        self._tell({"ev": "hello", **self._facts()})

    # ---- what is started

    def launch(self, number: int = 0) -> None:
        """Meets the other agents' address, then starts this node's share of the run."""
        place = self._meet(number)
        self._start(self.plan, self._command(self.plan, place))

    def _meet(self, number: int) -> Place:
        if self.num_agents == 1:
            return Place()
        if self.agent == 0:
            self._endpoint = slurm_meet.publish(self._folder, self.env, number)
        else:
            self._endpoint = slurm_meet.wait_for(self._folder)
        name = slurm_meet.own_name(self.env, self._endpoint.ip)
        self._tell({"ev": "meet", "endpoint": self._endpoint.address, "local_addr": name})
        return Place(self._endpoint.address, name, is_host=self.agent == 0)

    def _command(self, plan: Plan, place: Place) -> Command:
        if settings_of(plan).ranks == "task" and not self._in_reference:
            return self._marked(self._task_command(plan, place))
        made = warm.command(plan, self._folder, place)
        fallback = self._marked(made.fallback) if made.fallback is not None else None
        return replace(self._marked(made), fallback=fallback)

    def _task_command(self, plan: Plan, place: Place) -> Command:
        """One rank, this task's: what torchrun would set, taken from Slurm; no agent."""
        host, _, port = (place.endpoint if self.num_agents > 1 else "127.0.0.1:0").rpartition(":")
        local_rank, num_local = int(self.env.get("SLURM_LOCALID", "0")), plan.nproc
        if settings_of(plan).gpus == "task" and plan.device == "cuda":
            local_rank, num_local = 0, 1  # the one GPU that this task sees is device 0, and LOCAL_RANK is what scripts choose it by
        rank_env = {
            "RANK": str(self.agent), "WORLD_SIZE": str(self.num_agents), "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(num_local),
            "GROUP_RANK": self.env.get("SLURM_NODEID", "0"), "GROUP_WORLD_SIZE": str(plan.nodes), "ROLE_RANK": str(self.agent),
            "ROLE_NAME": "default", "ROLE_WORLD_SIZE": str(self.num_agents), "MASTER_ADDR": host, "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": plan.run_id,
        }  # fmt: skip
        if "OMP_NUM_THREADS" not in self.env:
            rank_env["OMP_NUM_THREADS"] = "1"  # as torchrun sets it
        argv = [*shim(plan, self._folder, "rank_shim.py"), python_of(plan), "-u", script_path(plan), *plan.script_args]
        env = {**rank_env, protocol.ENV_RUN_ID: plan.run_id, **for_the_shim(rank_environment(plan, self._folder))}
        return Command(tuple(argv), env, plan.cwd)

    def _marked(self, command: Command) -> Command:
        """With what tells a rank which supervisor and which attempt it belongs to, and where this node's FIFO lies."""
        marks = {protocol.ENV_NODE: str(self.agent), protocol.ENV_ATTEMPT: str(self.restarts)}
        return replace(command, env={**command.env, ENV_FIFO: str(self.private / FIFO), **for_the_shim(marks)})

    def _start(self, plan: Plan, command: Command) -> None:
        self._launched_at, self._failed_rank, self.ending = None, False, None
        self._run(wire.Job(plan.run_id, str(self._folder), plan.world_size, plan.grace_s, command, str(self.private)))

    # ---- what is told

    def _enter(self, run_dir: Path) -> None:
        """Makes the folder of this attempt the place where everything goes."""
        self._folder = attempt.make(run_dir, self.restarts)
        nodes = self._folder / attempt.NODES_DIR
        self._events = spawn.open_private(nodes / f"{self.agent}.jsonl")
        self._pulse = Pulse(nodes / f"{self.agent}.pulse")

    def _tell(self, event: dict[str, Any]) -> None:
        if event["ev"] == wire.RANK and self._launched_at is None:
            self._launched_at = time.monotonic()
        if event["ev"] == wire.EXIT and event["code"] != 0 and not event["by_us"]:
            self._say_down(event)
        if event["ev"] == wire.ENDING:
            self.ending = event
            if self._may_retry(event):
                return
        self._unsaid += (json.dumps({"t": time.time_ns(), "agent": self.agent, **event}) + "\n").encode()
        self._say()

    def _say(self) -> None:
        """What a full disk or a file server that is away did not take is said again at the next beat: it is no reason to end a training."""
        with contextlib.suppress(OSError):
            while self._unsaid:
                self._unsaid = self._unsaid[os.write(self._events, self._unsaid) :]

    def _say_down(self, event: dict[str, Any]) -> None:
        self._failed_rank = True
        if self.num_agents > 1:
            with contextlib.suppress(OSError):
                attempt.write_note(self._folder / attempt.NODES_DIR / attempt.DOWN, f"rank {event['rank']} on agent {self.agent}")

    def _facts(self) -> dict[str, Any]:
        names = ("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_CPUS_PER_TASK")
        return {
            "attempt": self.restarts,
            "slurm": {name.removeprefix("SLURM_").lower(): self.env.get(name, "") for name in names},
            "visible": self.env.get("CUDA_VISIBLE_DEVICES"),
            "num_cpus": len(os.sched_getaffinity(0)),
            "pid": os.getpid(),
            **slurm_meet.network_facts(self.env),
        }

    # ---- once a second

    def _patience(self) -> float:
        between = self._gang is None and self.ending is not None and not self._linger_until
        return ENDING_S if between else super()._patience()

    def _each_turn(self) -> None:
        gang = self._gang
        if gang is None and self.ending is not None and not self._leaving:
            self._after(self.ending)
        if not self._pulse.due:
            return
        self._say()
        with contextlib.suppress(OSError):
            self._pulse.beat(gang.members() if gang is not None and not gang.waiting else ())
        if gang is not None:
            self._look_around()

    def _look_around(self) -> None:
        assert self._gang is not None
        if attempt.is_gone(self.run_dir):
            return self._stop(FOLDER_DELETED)
        order, _, reason = attempt.read_note(self.run_dir / attempt.CONTROL).strip().partition(" ")
        if order == "stop":
            return self._stop(reason or "interrupted")
        nodes = self._folder / attempt.NODES_DIR
        if self._launched_at is not None and time.monotonic() > self._launched_at + self.plan.timeout_s + LIMIT_SLACK_S:
            return self._stop("timeout")
        if self.num_agents == 1 or self._in_reference:
            return None
        if attempt.read_note(nodes / attempt.DOWN) and not self._failed_rank:
            return self._stop(BY_PEER)
        latest = slurm_meet.published(self._folder)
        if self._endpoint is not None and latest is not None and latest.number > self._endpoint.number and self._launched_at is None:
            self._gang.stop(RETRY)
        return None

    def _on_signal(self) -> None:
        if signal.SIGTERM in os.read(self._wakeup, 4096):
            self._leaving = True
            self._stop(BY_SLURM, min(SLURM_GRACE_S, self.plan.grace_s))

    def _stop(self, reason: str, grace_s: float | None = None) -> None:
        """Looks at the ranks' connections first: with the ranks goes what tells of a host that is cut off."""
        gang = self._gang
        if gang is None:
            return
        if gang.reason == "exited" and self.num_agents > 1:
            peers = silence.silent_peers(process.pid for process in gang.members())
            if peers:
                self._tell({"ev": "silent", "peers": peers})
        gang.stop(reason, grace_s)

    # ---- after a gang has ended

    def _may_retry(self, ending: dict[str, Any]) -> bool:
        if ending["started"] or self._endpoint is None or self._endpoint.number + 1 >= MAX_TRIES or self._leaving:
            return False
        return ending["reason"] == RETRY or (self.agent == 0 and self._port_was_taken())

    def _port_was_taken(self) -> bool:
        """Whether the agent's log says so; the line stands above a long traceback."""
        try:
            said = (self.private / protocol.LOG_DIR / AGENT_LOG).read_text("utf-8", "replace")
        except OSError:
            return False
        return any(words in said[self._log_at :] for words in PORT_TAKEN)

    def _after(self, ending: dict[str, Any]) -> None:
        if self._may_retry(ending):
            assert self._endpoint is not None
            self.ending = None
            log = self.private / protocol.LOG_DIR / AGENT_LOG
            self._log_at = len(log.read_text("utf-8", "replace")) if log.is_file() else 0  # what the next try says stands behind it
            return self.launch(self._endpoint.number + 1)
        clean = ending["reason"] == "exited" and not ending["launcher_error"] and all(e["code"] == 0 for e in ending["exits"]) and ending["started"]
        reference = self.run_dir / rundir.REFERENCE_DIR
        if clean and self.agent == 0 and not self._in_reference and (reference / protocol.PLAN_FILE).is_file():
            return self._run_reference(reference)
        if not self._in_reference:
            self.exit_code = 0 if clean else 1
        if clean or self.num_agents == 1 or self._in_reference or self._others_ended():
            self._leaving = True
        return None

    def _run_reference(self, folder: Path) -> None:
        self.exit_code, self._in_reference = 0, True
        plan = rundir.read_plan(folder)
        os.close(self._events)
        self._enter(folder)
        self._start(plan, self._command(plan, Place()))

    def _others_ended(self) -> bool:
        """Whether every other agent has told its ending, or had the time for it."""
        now = time.monotonic()
        self._linger_until = self._linger_until or now + LINGER_S
        told = {agent for agent, event in attempt.Told(self._folder).events() if event["ev"] == wire.ENDING}
        return len(told) >= self.num_agents or now >= self._linger_until

    def close(self) -> None:
        log = self.private / protocol.LOG_DIR / AGENT_LOG
        if log.is_file():
            with contextlib.suppress(OSError):
                shutil.copyfile(log, self._folder / protocol.LOG_DIR / f"agent-{self.agent}.log")
        shutil.rmtree(self.private, ignore_errors=True)
        self._say()
        os.close(self._events)


def main(arguments: list[str]) -> int:
    run_dir = Path(arguments[0])
    reader, writer = os.pipe()  # the supervisor watches its stdin: this one never ends
    os.dup2(reader, 0)
    os.set_inheritable(writer, False)
    os.umask(0o077)
    spawn.become_subreaper()
    node = Node(run_dir, rundir.read_plan(run_dir))
    try:
        node.launch()
        node.serve()
    except OSError as error:
        node._tell(wire.never_launched(str(error)))
    finally:
        node.close()
    return node.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
