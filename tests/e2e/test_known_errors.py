"""The texts that LAU101 explains are what this torch really says; a release that words one differently fails here."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from harness.checks.lau import known

SCRIPT = Path(__file__).parent / "known_errors_script.py"
NOT_IN_ONE_CPU_PROCESS = {  # what cannot be raised there: a second rank, a CUDA device, or a shortage
    "start a new process before",
    "Cannot re-initialize CUDA",
    "must NOT be specified on non-destination",
    "received 0 items of ancdata",
    "invalid device ordinal",
    "Expected all tensors to be on the same device",
}


def test_each_text_is_what_torch_says() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kept = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES")}
    env = kept | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(SCRIPT)], env=env, capture_output=True, text=True, timeout=120, check=True)
    said = [json.loads(line)["said"] for line in done.stdout.splitlines() if line.startswith("{")]
    unknown = [text for text in said if known.meaning(text) is None]
    assert not unknown
    reached = {known.meaning(text) for text in said}
    left = [row.pattern for row in known.KNOWN if row not in reached and not any(n in row.pattern for n in NOT_IN_ONE_CPU_PROCESS)]
    assert not left, "no error of the script reaches these rows"


def test_an_error_of_the_users_own_gets_no_meaning() -> None:
    assert known.meaning("KeyError: 'image'") is None
    assert known.meaning("RuntimeError: the size of tensor a (3) must match the size of tensor b (4)") is None
