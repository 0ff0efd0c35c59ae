"""A real hang, seen by the watch, with the stacks of both ranks, and ended."""

from __future__ import annotations

import os
import time
from pathlib import Path

from harness.launch.driver import Supervisor
from harness.model import Plan, Scenario
from harness.watch.view import View

SCRIPT = """
import time
import torch
import torch.distributed as dist


def rank_local_decision():
    time.sleep(600)


dist.init_process_group("gloo")
for step in range(3):
    dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    rank_local_decision()
dist.all_reduce(torch.ones(1))
"""


def test_a_hang_is_seen_explained_and_ended(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run_dir = tmp_path / "run"
    plan = Plan(f"hang-{os.getpid()}", Scenario("x", "train.py"), (), 2, launcher="warm", cwd=str(tmp_path), hang_timeout_s=4.0)
    supervisor = Supervisor()
    try:
        handle = supervisor.run(plan, run_dir)
        view = View(run_dir, plan)
        until = time.monotonic() + 150.0
        while not (silent_s := view.silent_s()):
            assert handle.poll() is None, (run_dir / "logs" / "rank0.log").read_text()
            assert time.monotonic() < until
            supervisor.rest(0.2)
        assert silent_s >= 4.0 and "rank 0 has been in all_reduce for" in view.line()
        stacks = {stack.rank: stack.threads["MainThread"] for stack in view.stacks()}
        handle.stop("hang")
        ending = handle.wait(30.0)
    finally:
        supervisor.close()
    functions = [[frame.function for frame in stacks[rank] if "/probe/" not in frame.file] for rank in (0, 1)]
    assert functions == [["<module>", "all_reduce"], ["<module>", "rank_local_decision"]]
    assert stacks[0][0].line == SCRIPT.splitlines().index("dist.all_reduce(torch.ones(1))") + 1
    assert ending is not None and (ending.reason, ending.left_behind) == ("hang", ())
    assert [(exit.rank, exit.by_us) for exit in sorted(ending.exits, key=lambda exit: exit.rank)] == [(0, True), (1, True)]
