"""The nouns of the house: frozen dataclasses without logic. Every other room speaks in these words."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class Severity(enum.IntEnum):
    """How wrong the training is; ordered, so that `--fail-on` is one comparison."""

    ADVICE = 1
    WARNING = 2
    ERROR = 3

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Where:
    """A place in the user's code. `text` is the source line as the rank itself read it (the controller opens no recorded path)."""

    file: str
    line: int
    function: str = ""
    text: str = ""

    @property
    def place(self) -> str:
        """For a sentence: train.py:41."""
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"


@dataclass(frozen=True)
class Finding:
    """One cause. `message` stands alone, lower case, no full stop; `notes` hold the numbers; `help` is the exact edit."""

    code: str
    name: str
    severity: Severity
    message: str
    where: Where | None = None
    ranks: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    help: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    consequences: tuple[str, ...] = ()  # codes folded under this cause


class OutcomeKind(enum.Enum):
    """What became of one check in one run."""

    RAN = "ran"
    NOT_APPLICABLE = "not applicable"
    INCONCLUSIVE = "inconclusive"
    CRASHED = "crashed"
    DESELECTED = "deselected"


@dataclass(frozen=True)
class Outcome:
    code: str
    name: str
    kind: OutcomeKind
    reason: str = ""
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Header:
    """The `[tool.harness]` block of a script; every field is optional there. Read by `catalog`, never by importing the script."""

    nproc: int | None = None
    device: str | None = None
    timeout_s: float | None = None
    summary: str = ""
    args: Mapping[str, str] = field(default_factory=dict)  # our option -> template of script arguments, e.g. seed = "--seed {}"
    reference_nproc: int | None = None  # None: no reference run
    reference_args: tuple[str, ...] = ()
    expect: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenario:
    """A script that can be run: a built-in one (`builtin`) or the user's own."""

    name: str
    path: str
    header: Header = Header()
    builtin: bool = False


@dataclass(frozen=True)
class Slurm:
    """What a run asks of Slurm. `options`: long options of sbatch and their values, "" for a bare flag."""

    options: Mapping[str, str] = field(default_factory=dict)
    explicit: tuple[str, ...] = ()  # those that were typed: they win over SBATCH_* of the user's environment
    setup: tuple[str, ...] = ()  # shell lines before the ranks: module load and the like
    ranks: str = "agent"  # agent: torchrun's agent a node; task: one rank a Slurm task, without an agent
    gpus: str = "node"  # which GPUs a task sees: all that the job has on its node, or one of its own
    cpus_per_rank: int = 1
    parallel: int = 0  # elements of an array that run at once; 0: as many as Slurm finds room for
    max_pending_s: float | None = None
    allocation: str = ""  # id of the job in whose allocation we are: a step there instead of a new job


@dataclass(frozen=True)
class Plan:
    """What exactly will be run; written to plan.json before any process is started."""

    run_id: str
    scenario: Scenario
    script_args: tuple[str, ...]
    nproc: int  # processes a node
    nodes: int = 1
    launcher: str = "warm"
    device: str = "auto"
    backend: str = "auto"
    seed: int | None = None
    timeout_s: float = 600.0
    hang_timeout_s: float | None = None  # None: follows the run's own pace
    grace_s: float = 5.0
    cwd: str = "."
    env: Mapping[str, str] = field(default_factory=dict)  # what we add to the ranks' environment
    budget_bytes: int | None = None  # peak memory a rank, if the user sets one
    python: str = ""
    slurm: Slurm | None = None

    @property
    def world_size(self) -> int:
        return self.nproc * self.nodes


@dataclass(frozen=True)
class RankExit:
    """How one launched rank ended: `code` as waitpid gives it, negative for a signal."""

    rank: int
    pid: int
    code: int
    time_ns: int
    by_us: bool = False  # ended by our own TERM or KILL


@dataclass(frozen=True)
class RankStacks:
    """Stacks of one rank on request: thread name -> frames, innermost last."""

    rank: int
    threads: Mapping[str, tuple[Where, ...]]


@dataclass(frozen=True)
class Scheduler:
    """What the scheduler says of the job that carried a run."""

    job_id: str = ""
    state: str = ""  # as Slurm writes it: COMPLETED, TIMEOUT, NODE_FAIL, ...; "" where nobody could be asked
    reason: str = ""
    nodes: str = ""  # as Slurm writes it: n[1-2]
    attempt: int = 0  # how often the job was requeued before; only this attempt's recordings are read
    pending_s: float = 0.0
    rejected: str = ""  # what sbatch said where it took no job


@dataclass(frozen=True)
class Ending:
    """How the whole run ended. Written by the session; checks read it."""

    reason: str = "exited"  # exited | hang | timeout | interrupted | fail-fast | folder-deleted | scheduler | detached | launch-failed
    started: bool = True  # False: no line of the script ran
    exits: tuple[RankExit, ...] = ()
    hang_after_s: float = 0.0
    stacks: tuple[RankStacks, ...] = ()
    left_behind: tuple[str, ...] = ()  # what the sweep after the run still found
    launcher_error: str = ""
    wall_s: float = 0.0
    scheduler: Scheduler | None = None
    oom_kills: int = 0  # by how much the kernel's counter of out-of-memory kills on this host rose meanwhile


@dataclass(frozen=True)
class Verdict:
    """The end of one run: outcomes of all checks, findings settled, the exit code that follows."""

    plan: Plan
    outcomes: tuple[Outcome, ...]
    findings: tuple[Finding, ...]
    exit_code: int
    summary: Mapping[str, Any] = field(default_factory=dict)  # loss, memory, throughput figures for the report
    ending: Ending = Ending()
