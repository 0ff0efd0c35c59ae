"""LAU133 node-failed: a node went away under the job.

What it does
    Slurm ended the job as NODE_FAIL or BOOT_FAIL. An error: the training did not finish. The ranks of whose end nobody told are named: they were on
    that node.

Why it is bad
    The other ranks see connections that break or collectives that hang, and their messages point at the network or at the script.

Wrong
    RuntimeError: Connection closed by peer [10.0.0.17]      # on every rank but those of the node that died

Right
    scontrol show node n17                                   # why Slurm holds it to be down

Known limits
    Slurm notices a dead node after SlurmdTimeout, 5 minutes at most sites. A node that does not answer within ResumeTimeout of being switched on
    is NODE_FAIL too; BOOT_FAIL comes only where the site's own ResumeProgram reports the failure and the job may not be requeued.
    A job that is requeued is followed to its new end, and LAU137 says so.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.lau import blame, slurm_job
from harness.model import Finding, Severity
from harness.record import Run


class NodeFailed(Check):
    code = "LAU133"
    name = "node-failed"
    severity = Severity.ERROR
    substantial = False
    explains = ("LAU101", "LAU102", "LAU113", "LAU121", "LAU122", "LAU124", "LAU125", "HNG*")

    def end(self, run: Run) -> Iterable[Finding]:
        job = slurm_job.scheduler(run)
        if job.state not in ("NODE_FAIL", "BOOT_FAIL"):
            return
        lost = slurm_job.lost_ranks(run)
        hosts = [host for host, ranks in slurm_job.ranks_by_host(run).items() if set(ranks) & set(lost)]
        gone = f": {', '.join(hosts)}" if hosts else ""
        ending = f"{blame.plural(lost)} went with it" if lost else "no rank had been started on it"
        word = "did not boot" if job.state == "BOOT_FAIL" else "failed under the job"
        yield self.finding(
            f"a node {word}{gone}; {ending}",
            ranks=lost,
            notes=[slurm_job.said(job)],
            help=f"look at the node ({'scontrol show node ' + hosts[0] if hosts else 'sinfo -R'}); run again on others with --slurm exclude=NODE",
        )
