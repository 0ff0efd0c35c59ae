"""Threads that the ranks will use together, against the cores that there are."""

from __future__ import annotations

from collections.abc import Iterable

from harness.doctor.line import OK, WARNING, Host, Line

QUICK = True
WHY = "more computing threads than cores make every rank slower, sometimes many times; the slowest rank sets the pace of all"


def look(host: Host) -> Iterable[Line]:
    raw = host.environ.get("OMP_NUM_THREADS", "")
    told = raw.split(",")[0].strip()
    each = int(told) if told.isdecimal() and int(told) > 0 else None
    if each is None:
        each = 1 if host.nproc > 1 else host.num_cores  # torchrun sets 1 for several ranks
    says = f"{host.nproc} ranks x {each} thread{'s' * (each > 1)} on {host.num_cores} cores"
    if each * host.nproc <= host.num_cores:
        return [Line("threads", OK, says, WHY)]
    if each == 1:
        return [Line("threads", WARNING, says, WHY, f"take -n {host.num_cores}; timings of more ranks than cores mean nothing")]
    return [Line("threads", WARNING, says, WHY, f"set OMP_NUM_THREADS={max(1, host.num_cores // host.nproc)}")]
