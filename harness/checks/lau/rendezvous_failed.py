"""LAU113 rendezvous-failed: the ranks did not find each other.

What it does
    init_process_group raised: the address cannot be resolved or reached, the port is taken, the environment is incomplete, or the wait for
    the other ranks timed out. An error, at the call, with address and port as the rank had them.

Why it is bad
    The message of torch names a socket, not the setting that is wrong. A port that is taken belongs in most cases to an earlier run, or
    to a second rank that believes to be rank 0.

Wrong
    os.environ["MASTER_PORT"] = "29500"      # two jobs on one machine

Right
    torchrun --standalone ...                # picks a free port and tells all ranks

Known limits
    A rendezvous that waits and never fails is HNG104.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.lau import rendezvous
from harness.model import Finding, Severity
from harness.record import Event, Run


class RendezvousFailed(Check):
    code = "LAU113"
    name = "rendezvous-failed"
    severity = Severity.ERROR
    substantial = False
    explains = ("LAU101", "HNG*", "LAU124")

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(r.of("pg") for r in run.processes):
            raise NotApplicable("no process group was asked for")
        failed = [(rank, r, e) for rank, r in rendezvous.ranked(run) if (e := rendezvous.init_failure(r)) is not None and _is_rendezvous(e)]
        if not failed:
            return
        rank, recording, event = min(failed, key=lambda item: item[2].t_ns)
        text = str(event["message"])
        call = recording.of("pg")[-1]
        elsewhere, set_at = rendezvous.foreign(rendezvous.ranked(run))
        if elsewhere:
            yield self.finding(
                f"rank {rank} could not join the process group: {elsewhere} is no address of rank 0's machine",
                where=set_at or call.where or event.where,
                ranks=sorted({r for r, _, _ in failed}),
                notes=[rendezvous.address(recording), f"{event['type']}: {text.splitlines()[0][:300] if text else ''}"],
                help="do not set MASTER_ADDR in the script: torchrun sets it; for ranks of one machine it is 127.0.0.1",
            )
            return
        yield self.finding(
            f"rank {rank} could not join the process group: {self._reason(text)}",
            where=call.where or event.where,
            ranks=sorted({r for r, _, _ in failed}),
            notes=[rendezvous.address(recording), f"{event['type']}: {text.splitlines()[0][:300] if text else ''}"],
            help=self._help(text),
        )

    def _reason(self, text: str) -> str:
        low = text.lower()
        if "eaddrinuse" in low or "address already in use" in low:
            return "its port is taken"
        if "expected, but not set" in low or "environment variable" in low:
            return "the launcher's environment is incomplete"
        if "resolution" in low or "getaddrinfo" in low or "not known" in low:
            return "the address cannot be resolved"
        if "refused" in low:
            return "nobody listens at the address"
        if "timed out" in low or "timeout" in low:
            return "the other ranks did not come in time"
        if "ifname" in low or "unable to find address" in low:
            return "the network interface does not exist"
        return "the rendezvous failed"

    def _help(self, text: str) -> str:
        low = text.lower()
        if "address already in use" in low or "eaddrinuse" in low:
            return "let the launcher choose the port (torchrun --standalone), and do not set MASTER_PORT or a tcp:// port in the script"
        if "environment variable" in low:
            return "start the script with torchrun, which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        return "do not set MASTER_ADDR and MASTER_PORT in the script; check that all ranks reach that host and port"


def _is_rendezvous(event: Event) -> bool:
    return bool(rendezvous.FAILED.search(f"{event['type']}: {event['message']}"))
