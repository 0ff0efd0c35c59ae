"""The recording: the only thing that passes from the ranks to the controller. A leaf: stdlib only, importable in any rank.

One process writes three files into `<run>/rec/`, each append-only, each write one unbuffered `os.write`, so that SIGKILL loses at
most the last one; a torn tail is legal and readers drop it:

    <stem>.jsonl    events: one JSON object a line, {"k": kind, "t": time_ns, "s": optimizer steps so far, ...}
    <stem>.rows     fixed-width step rows (ROW below) after an 8 byte magic
    <stem>.params   per-parameter digests of a kept step (DETAIL below) after an 8 byte magic
    <stem>.status   one page, rewritten in place: what the process does right now (STATUS below)
    <stem>.shm      "inode name" a line: shared memory that the process made by name

`stem` is `<node_rank>-<pid>-<start time in clock ticks>`: unique on one host even when pids wrap.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

FORMAT = 1

# Environment that the launcher exports to the ranks: a private prefix, so that no user setting is shadowed.
ENV_RUN_DIR = "_HARNESS_RUN_DIR"  # absolute path of the run folder
ENV_RUN_ID = "_HARNESS_RUN_ID"  # marks every process of the run as ours
ENV_PROBE_DIR = "_HARNESS_PROBE_DIR"  # absolute path of harness/probe
ENV_SHADOWED = "_HARNESS_SITECUSTOMIZE"  # "1" while our sitecustomize chains the one it shadows
ENV_NODE = (
    "_HARNESS_NODE"  # which supervisor of a job owns this process: the first part of its recording's stem; unset: torchrun's GROUP_RANK
)
ENV_ATTEMPT = "_HARNESS_ATTEMPT"  # how often Slurm had requeued the job before
ENV_INTERFACE = "_HARNESS_INTERFACE"  # what gloo uses where the script names none
ENV_EXPECT = "_HARNESS_EXPECT"  # JSON: {"nproc": .., "nodes": .., "script": ..}: what the launcher was asked for

REC_DIR = "rec"
LOG_DIR = "logs"  # rank<R>.log, both streams as the rank wrote them
PLAN_FILE = "plan.json"
REPORT_FILE = "report.json"
SUPERVISOR_FILE = "supervisor.jsonl"  # the supervisor's own events: started, exit, sweep, ...
STACKS_REQUEST = "stacks.request"  # its content is a request number; a rank answers with a "stacks" event bearing it

SAVING = "save"  # the phase of a process inside torch.save
SEGMENTS_SUFFIX = ".shm"

ROWS_MAGIC = b"HNSROW\x02\n"
PARAMS_MAGIC = b"HNSPAR\x01\n"

# ---- step rows --------------------------------------------------------------------------------------------------------------
# One row an optimizer step (or a step without optimizer, see probe/steps.py). Digests come first and are contiguous, so that a
# reader can compare ranks on raw bytes and decode a row only where they differ. A digest of 0 means "not taken".
DIGESTS = (
    "grad",  # sampled gradient bits just before the step, by parameter name
    "param",  # sampled parameter bits just after it
    "full",  # integer hash of a rotating slice of all parameters (whole model where it fits the slice)
    "none",  # set of parameters whose .grad is None
    "train",  # training flags of the modules that own the parameters
    "hyper",  # lr, weight decay, betas, momentum of every group
    "indices",  # sample indices drawn since the last step, in order
    "batch",  # sampled content of the batches drawn since the last step
    "coll",  # (op, dtype, shape, call site) of the python-level collectives since the last step, in order
    "buffer",  # sampled buffers of the wrapped modules
    "rng",  # python, numpy and torch CPU generator states
    "draws",  # values drawn by random functions called from the user's own code since the last step
)
_NUMBERS = (
    ("step", "I"),  # 0-based, counted over all optimizers of the process
    ("opt", "H"),  # which optimizer (order of first step); OPT_BY_HAND: a step without an optimizer
    ("flags", "H"),  # FLAG_* below
    ("t_ns", "Q"),  # time.time_ns() at the end of the step
    ("seq", "q"),  # sequence number of the default process group after the step; -1: none
    ("num_coll", "I"),  # python-level collectives since the last step
    ("num_reduce", "I"),  # gradient all-reduces that DDP's reducer issued since the last step
    ("num_backward", "I"),
    ("num_forward", "I"),  # forwards through a wrapped (DDP, DataParallel) or root module since the last step
    ("num_batches", "I"),  # batches drawn since the last step, with gradients on
    ("num_samples", "I"),  # samples in them
    ("num_graphs", "I"),  # autograd graphs of earlier losses or outputs that are still alive
    ("sched", "i"),  # lr scheduler steps so far
    ("loss", "d"),  # the scalar backward() was called on (last one before the step), without a GradScaler's factor; nan: none
    ("lr", "d"),  # of the first group, at the step
    ("scale", "d"),  # GradScaler scale; 0: none
    ("grad_norm", "d"),  # norm returned by the last clip_grad_norm_ since the last step; nan: none
    ("wall_s", "f"),  # since the end of the last step
    ("data_s", "f"),  # of it: waiting for the data loader
    ("coll_s", "f"),  # of it: inside python-level collectives
    ("backward_s", "f"),  # of it: inside backward(), DDP's waiting included
    ("self_s", "f"),  # from the end of the last step to the first collective or backward: the rank's own work
    ("step_s", "f"),  # of it: inside optimizer.step()
    ("probe_s", "f"),  # of it: spent by the probe
    ("queue_s", "f"),  # of it: runnable, but waiting for a core (the kernel's run queue); 0 where the kernel does not say
    ("self_queue_s", "f"),  # of queue_s: in self_s
    ("rss_bytes", "Q"),
    ("cuda_alloc_bytes", "Q"),
    ("cuda_reserved_bytes", "Q"),
)
OPT_BY_HAND = 65_535  # the number of a step without an optimizer
FLAG_ZEROED = 1  # gradients were zeroed (or None) before the first backward since the last step
FLAG_ALL_NONE = 2  # every gradient of the optimizer was None
FLAG_CHANGED = 4  # the step changed at least one parameter (sampled)
FLAG_NO_SYNC = 8  # the last backward before the step ran inside DDP.no_sync()
FLAG_SKIPPED = 16  # GradScaler skipped the step
FLAG_EVAL = 32  # a backward ran while an owning module was in eval mode
FLAG_LOSS_NOT_FINITE = 64
FLAG_DDP = 128  # parameters of a DDP-wrapped module are stepped

ROW = struct.Struct("<" + "Q" * len(DIGESTS) + "".join(f for _, f in _NUMBERS))
ROW_FIELDS = (*DIGESTS, *(n for n, _ in _NUMBERS))
DIGEST_SLICE = {name: slice(8 * i, 8 * i + 8) for i, name in enumerate(DIGESTS)}
NUMBER_OFFSET: dict[str, tuple[int, struct.Struct]] = {}
_offset = 8 * len(DIGESTS)
for _name, _fmt in _NUMBERS:
    NUMBER_OFFSET[_name] = (_offset, struct.Struct("<" + _fmt))
    _offset += struct.calcsize("<" + _fmt)


class Row(NamedTuple):
    """One decoded row; the fields are described where DIGESTS and _NUMBERS are defined."""

    grad: int
    param: int
    full: int
    none: int
    train: int
    hyper: int
    indices: int
    batch: int
    coll: int
    buffer: int
    rng: int
    draws: int
    step: int
    opt: int
    flags: int
    t_ns: int
    seq: int
    num_coll: int
    num_reduce: int
    num_backward: int
    num_forward: int
    num_batches: int
    num_samples: int
    num_graphs: int
    sched: int
    loss: float
    lr: float
    scale: float
    grad_norm: float
    wall_s: float
    data_s: float
    coll_s: float
    backward_s: float
    self_s: float
    step_s: float
    probe_s: float
    queue_s: float
    self_queue_s: float
    rss_bytes: int
    cuda_alloc_bytes: int
    cuda_reserved_bytes: int


def _stride(step: int) -> int:
    """All rows of the first 1024, then every 2nd, 4th, ... of each doubling."""
    return 1 << max(0, step.bit_length() - 10)


def kept(step: int) -> bool:
    """Whether a row of this step number is written.

    The rule depends on the step number only, so every rank keeps the same steps; a recording grows by 512 rows a doubling.
    """
    return step % _stride(step) == 0


def next_kept(step: int) -> int:
    """The first step from `step` on whose row is written; the bound of a doubling is a multiple of both strides."""
    stride = _stride(step)
    return -(-step // stride) * stride


EVERY_GRAPH = 32  # steps in which every graph is counted (sensors/graphs.py): num_graphs is exact

# ---- per-parameter digests --------------------------------------------------------------------------------------------------
# header, then num uint32 gradient digests (0: grad None), then num uint32 parameter digests after the step, in the order of the
# names in the "params" event of that optimizer.
DETAIL = struct.Struct("<IHH")  # step, opt, num


def witnessed(step: int) -> bool:
    """Which steps carry digests: the first 256, where nearly all faults show, then every 16th, from 1024 on every 64th; the others are 0 ("not
    taken") on every rank. So are steps whose row is not kept.

    The whole witness costs about 1 ms a step of a tiny model. A divergence lasts: it is seen some steps late.
    """
    return step < 256 or (step % (16 if step < 1024 else 64) == 0 and kept(step))


def detail_kept(step: int, num_params: int) -> bool:
    """Which steps carry per-parameter digests: kept rows, thinned so that a model of many parameters stays under about 4 MB."""
    every = max(1, num_params * 8 * 2048 // 4_000_000)
    return kept(step) and (step < 64 or step % every == 0)


# ---- status page ------------------------------------------------------------------------------------------------------------
# seq counts writes (odd while writing), so that a reader can tell a torn page.
STATUS = struct.Struct("<IIQIIQ16s32sI")  # seq, pid, time_ns, progress counter, step, since_ns, phase, op, fallen
STATUS_SITE_BYTES = 400  # then "file:line:function" of the call the process is in, NUL padded
STATUS_BYTES = STATUS.size + STATUS_SITE_BYTES

# ---- event kinds ------------------------------------------------------------------------------------------------------------
# Fields beside k, t, s. `site` is always {"file", "line", "func", "text"} or null. Sensors add kinds of their own; each sensor's
# module docstring lists the fields it writes.
START = "start"  # pid, ppid, argv, rank, local_rank, world_size (as the environment says, -1: unset), role, start_ticks, python, env
TORCH = "torch"  # version, cuda (build), cuda_available, num_devices, threads
END = "end"  # how: "exit" | "exception" | "os._exit"; code; steps; probe_s; errors; lost_steps (not in steps: the probe failed at them)
PROBE_ERROR = "probe_error"  # where, error: something of the probe failed, and what it looks at is not in the recording
FAILURE = "failure"  # type, message, frames [site...], thread, phase, cause
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")  # what DDP, compile and FSDP put in front of a parameter's name
PYTHON_RNG = (
    "random",
    "uniform",
    "gauss",
    "randint",
    "randrange",
    "choice",
    "normalvariate",
    "triangular",
)  # of `random`, where the draws are noted
GATHER_INTO = ("all_gather_into_tensor", "all_gather_single")  # one call of torch under two names, the newer one since 2.14
REDUCE_SCATTER_INTO = ("reduce_scatter_tensor", "reduce_scatter_single")
WAITING, WAITING_FILE = "wait_tensor", "sensors/waiting.py"  # how a frame of that file is called: Work.wait() has no python frame of its own
POINT_TO_POINT = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})  # "op" of a "coll" event that needs no third rank
PROCESS_GROUP = "pg"  # rank, world_size, backend, torch (version), init_method, site, done: bool (event before the call and after it)
PARAMS = "params"  # opt, names, numels, shapes, dtypes, devices, ddp: [bool], wrapped: index of the wrap event or -1
STACKS = "stacks"  # request, threads {name: [site...]}


def digest_of(values: Sequence[int]) -> int:
    """One digest of the per-parameter digests of a step: what a "before" event holds of the next one."""
    blob = repr(list(values)).encode()
    return (crc32(blob) << 32 | crc32(blob, 0x5BD1E995)) or 1


def clean_name(name: str) -> str:
    """A parameter's name without what wrappers put in front of it, at any depth."""
    *parts, last = name.split(".")
    return ".".join([*(part for part in parts if f"{part}." not in WRAPPERS), last])


class Status(NamedTuple):
    """The decoded status page."""

    pid: int
    time_ns: int
    progress: int
    step: int
    since_ns: int
    phase: str
    op: str
    site: str
    fallen: int = 0  # threads of the process that ended by an exception


def parse_status(page: bytes) -> Status | None:
    """The status page as a Status, or None where it is torn or too short."""
    if len(page) < STATUS_BYTES:
        return None
    seq, pid, time_ns, progress, step, since_ns, phase, op, fallen = STATUS.unpack_from(page)
    if seq % 2 or seq == 0:
        return None
    site = page[STATUS.size : STATUS_BYTES].split(b"\0", 1)[0].decode("utf-8", "replace")
    return Status(
        pid,
        time_ns,
        progress,
        step,
        since_ns,
        phase.rstrip(b"\0").decode("ascii", "replace"),
        op.rstrip(b"\0").decode("ascii", "replace"),
        site,
        fallen,
    )
