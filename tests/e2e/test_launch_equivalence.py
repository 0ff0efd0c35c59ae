"""A rank is what a fresh interpreter under torchrun is, whichever launcher started it: every trap of the design's section 7 is looked at.

One script gathers all facts in one run, because a run under torchrun costs an import of torch in three processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.launch.driver import RunHandle, Supervisor
from harness.model import Ending, Plan, Scenario

FACTS = '''
"""Facts of this rank, as JSON, into the folder given as the last argument."""
import atexit, faulthandler, json, multiprocessing, os, random, resource, signal, sys, threading, time

START = {"first_threads": len(os.listdir("/proc/self/task")), "modules": sorted(m for m in sys.modules if m.startswith("harness")),
         "python_threads": [thread.name for thread in threading.enumerate()]}
import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

FOLDER, RANK = sys.argv[-1], os.environ["RANK"]


def spawned(index, queue):
    queue.put((index, __name__, os.environ["RANK"], torch.get_num_threads()))


def status(name):
    with open("/proc/self/status") as f:
        return next(line.split()[1] for line in f if line.startswith(name + ":"))


def write(name, value):
    with open(f"{FOLDER}/{name}{RANK}.json", "w") as f:
        json.dump(value, f)


def on_exit():
    write("atexit", {"main": sys.modules["__main__"].__dict__.get("MARK")})


def losses():
    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    generator = torch.Generator().manual_seed(7 + int(RANK))
    found = []
    for _ in range(5):
        x = torch.randn(4, 8, generator=generator)
        loss = model(x).pow(2).mean()
        loss.backward()
        with torch.no_grad():  # by hand: an optimizer would import dynamo, which takes longer than everything else here
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        found.append(loss.item())
    return found


def main():
    atexit.register(on_exit)
    environment = {k: v for k, v in os.environ.items() if k not in PER_RUN}
    unseeded = {"torch": torch.rand(2).tolist(), "numpy": numpy.random.rand(2).tolist(), "random": random.random(),
                "salt": hash("salt"), "set": list({"a", "b", "c", "d", "e", "f", "g"}),
                "authkey": bytes(multiprocessing.current_process().authkey).hex(), "seed": torch.initial_seed()}
    dist.init_process_group("gloo")
    total = torch.ones(1); dist.all_reduce(total)
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2, num_workers=2)
    began = time.time()
    batches = [batch[0].tolist() for batch in loader]
    loader_s = time.time() - began
    queue = mp.get_context("spawn").SimpleQueue()
    if RANK == "0":  # one import of torch more
        mp.spawn(spawned, (queue,), nprocs=1)
    else:
        queue.put(None)
    facts = {
        "argv": sys.argv[:-1], "cwd": os.getcwd(), "env": environment, "name": __name__, "spec": __spec__ is None, "file": __file__,
        "globals": sorted(k for k in globals() if k.startswith("__")), "path0": sys.path[0], "path": sys.path,
        "orig_argv": sys.orig_argv[1:-1], "executable": sys.executable, "flags": list(sys.flags),
        "start_method": multiprocessing.get_start_method(), "torch_threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "stdin": os.readlink("/proc/self/fd/0"),
        "isatty": [sys.stdout.isatty(), sys.stderr.isatty()],
        "encoding": [sys.stdout.encoding, sys.stdout.errors, sys.stdout.write_through, sys.stdout.line_buffering],
        "ignored": status("SigIgn"), "blocked": status("SigBlk"), "caught": status("SigCgt"),
        "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "leader": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()], "umask": os.umask(0o22),
        "limits": [resource.getrlimit(r) for r in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_STACK)],
        "nice": os.nice(0), "affinity": sorted(os.sched_getaffinity(0)), "faulthandler": faulthandler.is_enabled(),
        "default_dtype": str(torch.get_default_dtype()), "grad": torch.is_grad_enabled(), "rank": [dist.get_rank(), dist.get_world_size()],
        "total": total.item(), "batches": batches, "losses": losses(), "spawned": queue.get(),
        "main": [sys.modules[name].__file__ for name in ("__main__", "__mp_main__")],
        "excepthook": sys.excepthook is sys.__excepthook__, "cuda": torch.cuda.is_initialized(), "gc": __import__("gc").isenabled(),
        "open": sum(os.readlink(f"/proc/self/fd/{f}").startswith(("pipe:", "anon_inode:[pidfd]")) for f in os.listdir("/proc/self/fd")
                    if os.path.exists(f"/proc/self/fd/{f}")),
    }
    write("facts", {"same": {**facts, **START}, "unseeded": unseeded, "loader_s": loader_s, "parent": os.getppid()})
    print("to stdout", RANK)
    print("to stderr", RANK, file=sys.stderr)
    dist.destroy_process_group()


PER_RUN = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "_HARNESS_RUN_ID", "_HARNESS_RUN_DIR", "_HARNESS_MAIN_PID"}
MARK = "still here"
if __name__ == "__main__":
    main()
'''

Run = Callable[..., tuple[RunHandle, Ending, Path]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a script to its end on one supervisor, as one `harness run A B C` does."""
    supervisor = Supervisor()
    count = 0

    def start(launcher: str, folder: Path, script: str, *arguments: str, nproc: int = 2) -> tuple[RunHandle, Ending, Path]:
        nonlocal count
        count += 1
        run_dir = tmp_path_factory.mktemp(f"run{count}")
        plan = Plan(f"test-{os.getpid()}-{count}", Scenario("x", script), arguments, nproc, launcher=launcher, cwd=str(folder), grace_s=1.0)
        handle = supervisor.run(plan, run_dir)
        ending = handle.wait(150.0)
        assert ending is not None, (run_dir / "supervisor.jsonl").read_text()
        return handle, ending, run_dir

    yield start
    supervisor.close()


def facts_of(run: Run, launcher: str, tmp_path: Path) -> list[dict[str, Any]]:
    (tmp_path / "my script.py").write_text(FACTS)
    out = tmp_path / launcher
    out.mkdir(exist_ok=True)
    handle, ending, run_dir = run(launcher, tmp_path, "my script.py", "--lr", "0.1", "$x $$ ${local_rank}", "", "ü", str(out))
    logs = [(run_dir / "logs" / f"rank{rank}.log").read_text() for rank in (0, 1)]
    assert [exit.code for exit in ending.exits] == [0, 0], logs
    assert (handle.fallback, ending.left_behind, ending.launcher_error) == ("", (), "")
    assert all(f"to stdout {rank}\n" in log and f"to stderr {rank}\n" in log for rank, log in enumerate(logs))
    assert [json.loads((out / f"atexit{rank}.json").read_text()) for rank in (0, 1)] == [{"main": "still here"}] * 2
    return [json.loads((out / f"facts{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.timeout(600)
def test_a_warm_rank_is_a_torchrun_rank(run: Run, tmp_path: Path) -> None:
    torchrun, warm, again = (facts_of(run, launcher, tmp_path) for launcher in ("torchrun", "warm", "warm"))
    for rank in (0, 1):
        for each in (warm[rank], again[rank]):
            assert each["same"] == torchrun[rank]["same"]
        assert torchrun[rank]["same"]["rank"] == [rank, 2]
        assert torchrun[rank]["same"]["argv"] == ["my script.py", "--lr", "0.1", "$x $$ ${local_rank}", "", "ü"]
    for facts in (torchrun, warm, again):
        assert facts[0]["parent"] == facts[1]["parent"]  # torchrun's agent
        for name in ("torch", "numpy", "random", "salt", "authkey", "seed"):
            assert facts[0]["unseeded"][name] != facts[1]["unseeded"][name], name
    for name in ("torch", "numpy", "random", "authkey", "seed"):
        assert all(warm[rank]["unseeded"][name] != again[rank]["unseeded"][name] for rank in (0, 1)), name


def test_scripts_that_cannot_start(run: Run, tmp_path: Path) -> None:
    for name, text in (("broken.py", "x = = 1\n"), ("latin.py", "# coding: latin-1\nraise SystemExit('caf\xe9')\n")):
        (tmp_path / name).write_bytes(text.encode("latin-1"))
        _, ending, run_dir = run("warm", tmp_path, name)
        done = subprocess.run([sys.executable, "-u", name], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert min(exit.code for exit in ending.exits if not exit.by_us) == done.returncode == 1
        assert done.stdout in {(run_dir / "logs" / f"rank{rank}.log").read_bytes() for rank in (0, 1)}


def test_where_a_preloaded_interpreter_would_not_do_torchrun_takes_over(run: Run, tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '3'\nimport sys\nprint('torch' in sys.modules)\n")
    handle, ending, run_dir = run("warm", tmp_path, "early.py")
    assert handle.fallback == "early.py sets OMP_NUM_THREADS, which is read when torch is imported"
    assert [exit.code for exit in ending.exits] == [0, 0]
    assert (run_dir / "logs" / "rank1.log").read_text() == "False\n"


def test_inline_sets_what_torchrun_sets_for_one_process(run: Run, tmp_path: Path) -> None:
    script = "import json, os, sys\njson.dump({**os.environ, 'argv': sys.argv}, open('out.json', 'w'))\nsys.exit(4)\n"
    (tmp_path / "train.py").write_text(script)
    _, ending, _ = run("inline", tmp_path, "train.py", "-x", nproc=1)
    seen = json.loads((tmp_path / "out.json").read_text())
    assert [exit.code for exit in ending.exits] == [4]
    assert (seen["RANK"], seen["WORLD_SIZE"], seen["LOCAL_RANK"], seen["MASTER_ADDR"]) == ("0", "1", "0", "127.0.0.1")
    assert int(seen["MASTER_PORT"]) > 0 and seen["argv"] == ["train.py", "-x"]
    assert "TORCHELASTIC_USE_AGENT_STORE" not in seen and not any(name.startswith("_HARNESS_RANK_") for name in seen)
