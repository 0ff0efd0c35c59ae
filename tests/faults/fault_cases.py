"""The table of injected failures: what happens, when, to whom; and what the verdict has to say. One row a case.

`# culprit` marks the statement that the first error has to stand on. `codes`: what that error may be. `outside`: an act of the test itself
(fault_stage.OUTSIDE) once the script has said that the moment has come.
"""

from __future__ import annotations

from dataclasses import dataclass

from fault_script import TEMPLATE

DEAD_S = 8.0  # from a death to the verdict: the grace of 2 s, a second for helpers, the judgement; with room for a busy machine
HANG_S = 3.0  # --hang-timeout of the hang cases
HUNG_S = HANG_S + 5.0 + 3.0  # 5 s after the timeout is the bar; 3 s for starting interpreters on a busy machine
WAIT = "while True: time.sleep(0.05)"


@dataclass(frozen=True)
class Case:
    name: str
    when: str  # a moment of fault_script.MOMENTS; "": `what` is the whole script
    what: str
    codes: tuple[str, ...]  # of the first error; none: no error is expected
    ranks: tuple[int, ...] = (1,)  # the culprits
    guard: str = "RANK == 1"
    exit_code: int = 1
    reason: str = "exited"
    bound_s: float = DEAD_S
    nproc: int = 2
    hang_timeout_s: float | None = None
    timeout_s: float = 90.0
    outside: str | None = None
    disk_bytes: int = 0
    memory_bytes: int = 0  # limit of a control group that the script finds in FAULT_CGROUP; needs root
    says: str = ""  # part of the first error's message or notes
    sample: bool = False  # also run under torchrun


def hang(name: str, when: str, what: str, codes: tuple[str, ...], **more: object) -> Case:
    settled: dict[str, object] = {"reason": "hang", "bound_s": HUNG_S, "hang_timeout_s": HANG_S, **more}
    return Case(name, when, what, codes, **settled)  # type: ignore[arg-type]


BOTH = "True"
# gradients averaged by hand, in a loop over steps below one over epochs; WHAT between two reductions, BETWEEN behind an epoch
BY_HAND = TEMPLATE.split("model = ")[0] + """
model, generator = nn.Linear(8, 1), torch.Generator().manual_seed(RANK)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
def train(epoch):
    for step in range(4):
        opt.zero_grad()
        model(torch.randn(16, 8, generator=generator)).pow(2).mean().backward()
        for number, parameter in enumerate(model.parameters()):
            if number == 1 and (epoch, step) == (1, 2) and RANK == 1:
                WHAT
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        opt.step()
for epoch in range(3):
    train(epoch)
    if epoch == 1 and RANK == 1:
        BETWEEN
dist.destroy_process_group()
"""


def by_hand(what: str = "pass", between: str = "pass") -> str:
    return BY_HAND.replace("WHAT", what.replace("\n", "\n" + " " * 16)).replace("BETWEEN", between.replace("\n", "\n" + " " * 8))


DEATHS = (
    # ---- exceptions, at every moment
    Case("raise_at_start", "start", "raise ValueError('no config')  # culprit", ("LAU101",)),
    Case("raise_before_rendezvous", "rendezvous", "raise KeyError('MASTER')  # culprit", ("LAU101",)),
    Case("raise_in_step", "step", "raise ValueError('bad batch')  # culprit", ("LAU101",), sample=True),
    Case("raise_among_three", "step", "raise ValueError('bad batch')  # culprit", ("LAU101",), nproc=3),
    Case("raise_in_evaluation", "evaluation", "raise ZeroDivisionError('empty test set')  # culprit", ("LAU101",)),
    Case("raise_while_saving", "saving", "open('/nonexistent/model.pt', 'w')  # culprit", ("LAU101",), guard="RANK == 0", ranks=(0,)),
    Case("raise_in_teardown", "teardown", "raise RuntimeError('cannot close')  # culprit", ("LAU101",)),
    Case("raise_after_teardown", "end", "raise RuntimeError('cannot report')  # culprit", ("LAU101",)),
    Case("memory_error", "step", "raise MemoryError('unable to allocate 64 GiB')  # culprit", ("LAU101",)),
    Case(
        "killed_by_the_kernel_for_memory",
        "step",
        "with open(os.environ['FAULT_CGROUP'] + '/cgroup.procs', 'w') as file: file.write(str(os.getpid()))\n"
        "held = []\nwhile True: held.append(bytearray(b'x' * (1 << 22)))",
        ("LAU103",),
        memory_bytes=48_000_000,
    ),
    Case("torch_cannot_allocate", "step", "torch.empty(1 << 50)  # culprit", ("LAU101",)),
    Case(
        "tears_its_group_down_first",
        "step",
        "try:\n    raise ValueError('bad batch')  # culprit\nfinally:\n    dist.destroy_process_group()\n    time.sleep(1.0)",
        ("LAU101",),
        sample=True,
    ),
    Case(
        "two_within_a_millisecond",
        "step",
        "at = time.monotonic() + 0.3\nwhile time.monotonic() < at: pass\nraise ValueError('both')  # culprit",
        ("LAU101",),
        guard=BOTH,
        ranks=(0, 1),
    ),
    Case(
        "two_die_one_is_first",
        "step",
        "time.sleep(0.002 * RANK)\nraise ValueError(f'rank {RANK}')  # culprit",
        ("LAU101",),
        guard=BOTH,
        ranks=(0, 1),
    ),
    Case("syntax_error", "", "import os\nopen(f'here{os.environ[\"RANK\"]}', 'w')\nx = = 1  # culprit\n", ("LAU101",), ranks=(0, 1), bound_s=0),
    Case("import_error", "start", "import no_such_module  # culprit", ("LAU101",), guard=BOTH, ranks=(0, 1)),
    Case(
        "exception_in_thread_that_feeds",
        "step",
        "def feed():\n    raise OSError('shard is gone')  # culprit\nthreading.Thread(target=feed).start()\nqueue.Queue().get()",
        ("LAU101",),
        reason="hang",
        hang_timeout_s=HANG_S,
        bound_s=3 * HANG_S + 8.0,  # a rank that waits in code of its own is given three times the limit
    ),
    # ---- exits
    Case("sys_exit_number", "step", "sys.exit(3)  # culprit", ("LAU101",)),
    Case("sys_exit_text", "step", "sys.exit('no such data set')  # culprit", ("LAU101",), says="no such data set"),
    Case("raise_system_exit", "step", "raise SystemExit('no such data set')  # culprit", ("LAU101",), says="no such data set"),
    Case("os_exit", "step", "os._exit(7)  # culprit", ("LAU101",)),
    Case("os_exit_at_start", "start", "os._exit(7)  # culprit", ("LAU101",)),
    Case("argparse_error", "start", "import argparse\nargparse.ArgumentParser().parse_args(['--lrr', '1'])  # culprit", ("LAU101",), guard=BOTH, ranks=(0, 1)),
    # ---- signals
    Case("sigkill_by_itself", "step", "os.kill(os.getpid(), signal.SIGKILL)  # culprit", ("LAU102",), sample=True),
    Case("sigkill_in_evaluation", "evaluation", "os.kill(os.getpid(), signal.SIGKILL)  # culprit", ("LAU102",)),
    Case("sigkill_while_saving", "saving", "os.kill(os.getpid(), signal.SIGKILL)  # culprit", ("LAU102",), guard="RANK == 0", ranks=(0,)),
    Case("sigkill_at_start", "start", "os.kill(os.getpid(), signal.SIGKILL)  # culprit", ("LAU102",)),
    Case("sigkill_between_reductions_by_hand", "", by_hand("here()\nos.kill(os.getpid(), signal.SIGKILL)  # culprit"), ("LAU102",)),
    Case("os_exit_between_reductions_by_hand", "", by_hand("here()\nos._exit(7)  # culprit"), ("LAU101",)),
    Case("sigkill_from_outside", "step", WAIT, ("LAU102",), outside="kill rank"),
    Case("sigterm_from_outside", "step", WAIT, ("LAU102",), outside="terminate rank"),
    Case("segmentation_fault", "step", "ctypes.string_at(0)  # culprit", ("LAU102",), sample=True),
    Case(
        "segmentation_fault_in_thread",
        "step",
        "def crash():\n    ctypes.string_at(0)  # culprit\nthreading.Thread(target=crash).start()\ntime.sleep(60)",
        ("LAU102",),
    ),
    Case("abort", "step", "os.abort()  # culprit", ("LAU102",)),
    Case("abort_in_teardown", "teardown", "os.abort()  # culprit", ("LAU102",)),
    Case(
        "bus_error_on_shared_memory",
        "step",
        "import mmap\nfile = open('/dev/shm/harness_fault_bus', 'w+b')\nos.unlink(file.name)\nfile.truncate(4096)\n"
        "page = mmap.mmap(file.fileno(), 4096)\nfile.truncate(0)\npage[0] = 1  # culprit",
        ("LAU102",),
        says="SIGBUS",
    ),
    Case(
        "gloo_abort_on_sizes",
        "step",
        "dist.all_reduce(torch.ones(1000 * (1 + RANK)))  # culprit",
        ("SYN128", "SYN123", "LAU102", "LAU101"),
        guard=BOTH,
        ranks=(0, 1),
    ),
    Case(
        "loader_worker_killed",
        "step",
        "class Data(Dataset):\n    def __len__(self): return 64\n"
        "    def __getitem__(self, i):\n        if i == 9: os.kill(os.getpid(), signal.SIGKILL)\n        return torch.ones(1)\n"
        "for batch in DataLoader(Data(), batch_size=4, num_workers=1): pass  # culprit",
        ("LAU101",),
    ),
    Case(
        "loader_worker_raises",
        "step",
        "class Data(Dataset):\n    def __len__(self): return 64\n    def __getitem__(self, i): return [1, 2][i]  # culprit\n"
        "for batch in DataLoader(Data(), batch_size=4, num_workers=1): pass",
        ("LAU101",),
    ),
    # ---- what comes from outside
    Case("agent_killed", "step", WAIT, ("LAU102", "LAU101", "LAU126"), outside="kill agent", ranks=(), guard=BOTH),
    Case("ctrl_c", "step", WAIT, (), outside="ctrl-c", exit_code=130, reason="interrupted", guard=BOTH),
    Case("sigterm", "step", WAIT, (), outside="SIGTERM", exit_code=143, reason="interrupted", guard=BOTH),
    Case("sighup", "step", WAIT, (), outside="SIGHUP", exit_code=143, reason="interrupted", guard=BOTH),
    Case(
        "ctrl_c_of_a_stubborn_rank",
        "step",
        f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{WAIT}",
        (),
        outside="ctrl-c",
        exit_code=130,
        reason="interrupted",
        guard=BOTH,
    ),
    Case(
        "ctrl_c_with_grandchildren",
        "step",
        "import subprocess\nsubprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'], start_new_session=True)\n" + WAIT,
        (),
        outside="ctrl-c",
        exit_code=130,
        reason="interrupted",
    ),
    Case("wall_limit", "step", WAIT, ("LAU124",), guard=BOTH, ranks=(), timeout_s=6.0, reason="timeout", bound_s=16.0),
    Case("run_folder_deleted", "step", WAIT, ("LAU125",), outside="delete folder", guard=BOTH, ranks=(), reason="folder-deleted"),
    Case(
        "full_disk",
        "saving",
        "with open('fill', 'wb', buffering=0) as file:\n    while True: file.write(b'x' * 65536)  # culprit",
        ("LAU101",),
        guard="RANK == 0",
        ranks=(0,),
        disk_bytes=40_000_000,
        says="No space left",
    ),
)

UNEVEN = TEMPLATE.replace("for step in range(6):", "here()\nfor step in iter(range(5 - RANK)):  # culprit").replace(
    "    # @evaluation\n    dist.all_reduce(total)\n", ""
)
WORKER = (
    "lock = threading.Lock()\nlock.acquire()\nclass Data(Dataset):\n    def __len__(self): return 64\n"
    "    def __getitem__(self, i):\n        with lock: return torch.ones(1)\nfor batch in DataLoader(Data(), batch_size=4, num_workers=1): pass  # culprit"
)
DESTROY = TEMPLATE.split("torch.manual_seed")[0] + """
tensor = torch.ones(1)
dist.all_reduce(tensor)
here()
if RANK == 1:
    PEER
work = dist.all_reduce(tensor, async_op=True)
dist.destroy_process_group()
"""
HANGS = (
    hang("one_of_three_stands_apart", "step", "threading.Event().wait()  # culprit", ("HNG101",), nproc=3, bound_s=3 * HANG_S + 8.0, says="ranks 0,2 wait"),
    hang("collective_under_one_rank", "step", "dist.barrier()  # culprit", ("OUT101", "HNG103"), sample=True),
    hang("uneven_inputs", "", UNEVEN, ("DAT111",)),
    hang(
        "swapped_order",
        "step",
        "if RANK: dist.barrier()\ndist.all_reduce(torch.ones(4))\nif not RANK: dist.barrier()",
        ("SYN121", "HNG103", "OUT101"),
        guard=BOTH,
        ranks=(0, 1),
    ),
    hang(
        "rank_local_decision",
        "",
        TEMPLATE.replace("    opt.step()\n", "    opt.step()\n    if float(loss) * (1 + 99 * RANK) > 9:  # culprit\n        here()\n        break\n").replace(
            "dist.barrier()", "dist.barrier()\ndist.all_reduce(torch.ones(1))"
        ),
        ("EVL103",),
    ),
    hang("dead_peer", "evaluation", "os._exit(0)", ("HNG106",), reason="exited", hang_timeout_s=None, bound_s=DEAD_S),
    hang("deadlocked_loader_worker", "step", WORKER, ("HNG105",), bound_s=3 * HANG_S + 8.0),
    hang(
        "fork_after_threads",
        "step",
        "import multiprocessing\ntorch.set_num_threads(2)  # culprit\ntorch.randn(512, 512) @ torch.randn(512, 512)\n"
        "child = multiprocessing.get_context('fork').Process(target=lambda: torch.randn(512, 512) @ torch.randn(512, 512))\nchild.start()\nchild.join()",
        ("SHM102", "HNG105"),
        bound_s=9 * HANG_S + 8.0,
    ),
    hang("missing_peer_at_start", "rendezvous", "time.sleep(600)", ("HNG104",), says="rank 1", bound_s=3 * HANG_S + 8.0),
    hang(
        "stores_on_ports_of_their_own",
        "rendezvous",
        "import socket\nwith socket.create_server(('127.0.0.1', 0)) as free: port = free.getsockname()[1]\n"
        "dist.TCPStore('127.0.0.1', port, 2, is_master=RANK == 0)  # culprit",
        ("HNG104",),
        guard=BOTH,
        ranks=(0, 1),
        says="each at an address of its own",
    ),
    hang("stuck_in_python_code", "step", "threading.Event().wait()  # culprit", ("HNG101",), bound_s=3 * HANG_S + 8.0),
    hang("stuck_between_reductions_by_hand", "", by_hand("here()\nthreading.Event().wait()  # culprit"), ("HNG101",), bound_s=3 * HANG_S + 8.0),
    hang("stuck_between_epochs", "", by_hand(between="here()\nthreading.Event().wait()  # culprit"), ("HNG101",), bound_s=3 * HANG_S + 8.0),
    hang("stuck_in_evaluation", "evaluation", "threading.Event().wait()  # culprit", ("HNG101",), bound_s=3 * HANG_S + 8.0),
    hang("stuck_in_destroy", "", DESTROY.replace("PEER", "threading.Event().wait()  # culprit"), ("HNG101",), bound_s=3 * HANG_S + 8.0),
    hang("recv_that_nobody_sends", "step", "dist.recv(torch.ones(1), src=0)  # culprit", ("HNG103", "HNG101", "OUT101"), ranks=(0, 1)),
    hang(
        "slow_rank_that_is_not_stuck", "step", "until = time.monotonic() + 6\nwhile time.monotonic() < until: pass", (), exit_code=0, reason="exited", bound_s=30.0
    ),
)
CASES = (*DEATHS, *HANGS)
