"""What an older job left in the environment."""

from __future__ import annotations

from collections.abc import Iterable

from harness.doctor.line import OK, WARNING, Host, Line

WHY = "a script that is started without a launcher believes RANK and WORLD_SIZE, waits for ranks that do not exist, or trains alone"
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
PREFIXES = ("TORCHELASTIC_", "PET_")


def look(host: Host) -> Iterable[Line]:
    held = sorted(name for name in host.environ if name in NAMES or name.startswith(PREFIXES))
    if not held:
        return [Line("environment", OK, "no rank or address of another job", WHY)]
    says = f"another job left {', '.join(f'{name}={host.environ[name]}' for name in held)}"
    return [Line("environment", WARNING, says, WHY, f"unset {' '.join(held)} (harness run does not pass them on)")]
