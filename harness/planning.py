"""From what was typed to a Plan: every refusal that can be known before a process is started is made here."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.dataroot import check_data_root
from harness.errors import UsageError, did_you_mean
from harness.fixedport import check_fixed_port
from harness.model import Plan, Scenario, Slurm
from harness.settings import Settings, site_profiles

MAX_NPROC = 1024  # a typing mistake must not bring the machine down

# What an older job may have left in the environment. torchrun reads PET_*; a script reads the rest.
STALE = frozenset(
    ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME",
     "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"]
)  # fmt: skip
STALE_PREFIXES = ("TORCHELASTIC_", "PET_")


@dataclass(frozen=True)
class Job:
    """One script of this session: its plan, its settled settings, and the plan of its reference run where it has one."""

    plan: Plan
    settings: Settings
    reference: Plan | None = None


def clean_environment(environ: MutableMapping[str, str]) -> list[str]:
    """Take out what an older job left there; the names that were."""
    stale = sorted(name for name in environ if name in STALE or name.startswith(STALE_PREFIXES))
    for name in stale:
        del environ[name]
    for name in [n for n in environ if n.startswith("_HARNESS_")]:
        del environ[name]
    return stale


def make_job(scenario: Scenario, settings: Settings, script_args: Sequence[str], cwd: Path, environ: Mapping[str, str]) -> Job:
    nproc = _nproc(settings)
    device = settings["device"]
    _check_launcher(settings)
    _check_gpus(settings, nproc, environ)
    ours = _mapped_arguments(scenario, settings, cwd)
    _check_data(scenario, settings, script_args, cwd)
    if settings["launcher"] != "slurm":  # there the ports are other hosts'
        check_fixed_port(cwd / scenario.path)
    plan = Plan(
        run_id=secrets.token_hex(8),
        scenario=scenario,
        script_args=(*ours, *script_args),
        nproc=nproc,
        nodes=settings["nodes"],
        launcher=settings["launcher"],
        device=device,
        backend=settings["backend"],
        seed=settings["seed"],
        timeout_s=settings["timeout_s"],
        hang_timeout_s=settings["hang_timeout_s"],
        grace_s=settings["grace_s"],
        cwd=str(cwd),
        env={"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {},
        budget_bytes=settings["memory_budget"],
        python=sys.executable,
        slurm=_slurm(settings, cwd, environ),
    )
    return Job(plan, settings, None if settings["no_reference"] else reference_of(plan, environ))


def reference_of(plan: Plan, environ: Mapping[str, str]) -> Plan | None:
    """The same script with as many processes as its header says for the reference; None where that is no other run.

    Each of its processes has the threads that a rank has (torchrun gives several ranks one each, and a single one every core): the same
    sums in the same order, a scaling that is ranks against ranks, and no team of threads that spins on a busy machine.
    """
    header = plan.scenario.header
    if header.reference_nproc is None or header.reference_nproc == plan.world_size:
        return None
    return replace(
        plan,
        run_id=f"{plan.run_id}-reference",
        nproc=header.reference_nproc,
        nodes=1,
        slurm=None,
        script_args=(*plan.script_args, *header.reference_args),
        env={"OMP_NUM_THREADS": "1", **plan.env} if plan.nproc > 1 and "OMP_NUM_THREADS" not in environ else plan.env,
    )


# ---- what can be refused


def _nproc(settings: Settings) -> int:
    nproc: int = settings["nproc"]
    if settings["launcher"] == "inline":
        if nproc > 1 and settings.origin("nproc") == "-n/--nproc":
            raise UsageError(
                f"--launcher inline runs one process in the foreground, but -n is {nproc}; leave -n out or take --launcher warm"
            )
        return 1
    if nproc > MAX_NPROC:
        raise UsageError(f"{settings.origin('nproc')}: nproc is {nproc}; more than {MAX_NPROC} processes a node are refused")
    return nproc


def _check_launcher(settings: Settings) -> None:
    launcher, nodes = settings["launcher"], settings["nodes"]
    if launcher != "slurm":
        for key in ("slurm", "site", "max_pending_s"):
            if settings.origin(key).startswith("--"):
                raise UsageError(f"{settings.origin(key)} is for --launcher slurm, but the launcher is {launcher}")
    if nodes > 1 and launcher != "slurm":
        raise UsageError(f"--nodes {nodes} needs a launcher that has nodes, and {launcher} has one; leave --nodes out")


def _slurm(settings: Settings, cwd: Path, environ: Mapping[str, str]) -> Slurm | None:
    if settings["launcher"] != "slurm":
        return None
    from harness.launch import slurm_options

    profile = slurm_options.profile_of(site_profiles(cwd), settings["site"], settings.origin("site"))
    allocation = slurm_options.allocation_of(environ)
    return slurm_options.make(settings["slurm"], profile, settings.origin("slurm"), settings["max_pending_s"], allocation)


def _check_gpus(settings: Settings, nproc: int, environ: Mapping[str, str]) -> None:
    if settings["device"] == "cpu" and settings["backend"] == "nccl":
        raise UsageError("--backend nccl needs GPUs, but the device is cpu; take --backend gloo")
    if settings["device"] != "cuda" or settings["launcher"] == "slurm":  # the GPUs are on other machines: Slurm knows them
        return
    num_gpus = count_gpus(environ)
    if num_gpus is None:
        return
    asked = f"device cuda ({settings.origin('device')})"
    if num_gpus == 0:
        raise UsageError(f"{asked}, but this machine shows no GPU; take --device cpu")
    if nproc > num_gpus:
        raise UsageError(
            f"{asked} with {nproc} processes a node, but {num_gpus} GPU{'s' * (num_gpus > 1)}; take -n {num_gpus} or --device cpu"
        )


def count_gpus(environ: Mapping[str, str], proc: Path = Path("/proc/driver/nvidia/gpus"), dev: Path = Path("/dev")) -> int | None:
    """GPUs that a rank will see, counted without torch; None where only torch could tell."""
    physical = len(list(proc.iterdir())) if proc.is_dir() else len([p for p in dev.glob("nvidia*") if p.name[6:].isdigit()])
    if physical == 0:
        return None if (dev / "kfd").exists() else 0  # kfd: an AMD GPU, which torch also calls cuda
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return physical
    count = 0
    for entry in visible.split(","):
        entry = entry.strip()
        if not entry or entry == "-1" or (entry.isdigit() and int(entry) >= physical):
            break  # CUDA ignores everything behind the first invalid entry
        count += 1
    return count


def _mapped_arguments(scenario: Scenario, settings: Settings, cwd: Path) -> tuple[str, ...]:
    """Arguments by which our options reach the script, as its header says; an option that cannot reach it is refused."""
    values = {
        "seed": settings["seed"],
        "data": None if settings["data"] is None else str(cwd / settings["data"]),
        "device": None if settings["device"] == "auto" else settings["device"],
        "backend": None if settings["backend"] == "auto" else settings["backend"],
    }
    arguments: list[str] = []
    for option, value in values.items():
        template = scenario.header.args.get(option)
        if value is None:
            continue
        if template is not None:
            arguments += [token.replace("{}", str(value)) for token in shlex.split(template)]
        elif option != "device" or value == "cuda":  # cpu also reaches a script through CUDA_VISIBLE_DEVICES
            raise UsageError(_cannot_reach(scenario, option, settings.origin(option)))
    return tuple(arguments)


def _cannot_reach(scenario: Scenario, option: str, origin: str) -> str:
    line = f'{option} = "--{option} {{}}"'
    return (
        f"{origin}: {option} cannot reach {scenario.name}, whose header maps it to no argument; "
        f"pass the script's own option after --, or add {line} below [tool.harness.args] in its header"
    )


def _check_data(scenario: Scenario, settings: Settings, script_args: Sequence[str], cwd: Path) -> None:
    if "--download" in script_args:
        return
    data = settings["data"] or _own_data_argument(scenario, script_args)
    if data is not None:
        check_data_root(cwd / data, strict=scenario.builtin)


def _own_data_argument(scenario: Scenario, script_args: Sequence[str]) -> str | None:
    """The data folder where the user passed the script's own option instead of ours."""
    template = shlex.split(scenario.header.args.get("data", ""))
    if len(template) != 2 or template[1] != "{}":
        return None
    option = template[0]
    for i, word in enumerate(script_args):
        if word == option and i + 1 < len(script_args):
            return script_args[i + 1]
        if word.startswith(option + "="):
            return word[len(option) + 1 :]
    return None


# ---- checks by code, name or family


def expand_codes(words: Sequence[str], known: Mapping[str, str], origin: str) -> frozenset[str]:
    """Exact codes for codes, names and families (`SYN`, `SYN1`). `known`: code -> name."""
    codes: set[str] = set()
    for word in words:
        upper = word.upper()
        matched = {c for c, name in known.items() if upper == c or word.lower() == name or (upper.isalnum() and c.startswith(upper))}
        if not matched:
            families = sorted({c[:3] for c in known})
            hint = did_you_mean(word, [*known, *known.values(), *families], "harness explain lists the codes")
            raise UsageError(f"{origin}: unknown check {word!r}{hint}")
        codes |= matched
    return frozenset(codes)
