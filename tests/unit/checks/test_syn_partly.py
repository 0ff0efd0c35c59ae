"""SYN128 where all that an optimizer holds is left out of the reduction: whose line it is, and by which name a bare tensor goes."""

from __future__ import annotations

import struct

from builder import event, findings, recording, row, run
from test_syn_kinds import coll

from harness.checks.syn.partly import PartlySynced
from harness.probe import protocol
from harness.record import Run


def apart_by_optimizer(*, bare: bool = True, backwards: int = 1) -> Run:
    """A model whose gradients are reduced, and an optimizer for one tensor beside it whose gradient is not."""
    made = []
    for r in (0, 1):
        told = [event("params", opt=0, names=["w"], ddp=[-1], numels=[4]), event("initial", opt=0, each=[7])]
        held = {"held_as": {"param[0][0]": "log_alpha"}} if bare else {}
        told += [event("params", opt=1, names=["param[0][0]"], ddp=[-1], numels=[1], **held), event("initial", opt=1, each=[8])]
        for s in range(6):
            own = s % 2
            values = {"local": {"0": [1.0 + r + s]}, "at_step": {"0": [1.0 + s + r * own]}}
            told.append(event("gradients", line=139 if own else 134, s=s, opt=own, names={"0": "param[0][0]" if own else "w"}, **values))
            told += [coll("all_reduce", 51, s=s, numel=4, grad=True)] * (1 - own)
        rows = [
            row(s, opt=s % 2, grad=9 + s + 100 * r * (s % 2), param=9 + s + 100 * r * (s % 2), num_coll=1 - s % 2, num_backward=1 if not s % 2 else backwards)
            for s in range(6)
        ]
        one = recording(told, rows, rank=r, world_size=2)
        one.params = b"".join(protocol.DETAIL.pack(s, s % 2, 1) + struct.pack("<2I", *[10 + s + 50 * r * (s % 2)] * 2) for s in range(6))
        made.append(one)
    return run(made)


def test_an_optimizer_that_is_left_out_whole() -> None:
    (found,) = findings(PartlySynced, apart_by_optimizer())
    assert found.where is not None and found.where.line == 139 and found.message.endswith("log_alpha")
    (found,) = findings(PartlySynced, apart_by_optimizer(bare=False))
    assert found.message.endswith("param[0][0]")
    (found,) = findings(PartlySynced, apart_by_optimizer(backwards=0))  # one backward for both: the reduction passes it over
    assert found.where is not None and found.where.line == 51
