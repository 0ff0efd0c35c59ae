"""SYN135 weights-shared-gradients-not: the parameters are made equal after every step, the gradients are averaged by nobody

What it does
    In a job without DDP, looks for optimizers whose gradients differ between ranks at every step and whose parameters agree after each of
    them, while no collective between the steps reduces or gathers anything of the gradients' size.

Why it is bad
    `ZeroRedundancyOptimizer` shards the update and broadcasts the new weights; it does not average gradients. Each parameter is trained on
    the data of the one rank that owns it, and what the other ranks computed for it is thrown away. The weights stay equal, the loss falls.

Wrong
    model = Net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Adam)

Right
    model = DDP(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Adam)

Known limits
    Not judged where gradients are sent point to point, over sub-groups, or by another library than torch.distributed, nor where each rank's
    optimizer holds only its own part of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.probe import protocol
from harness.record import Run

SENDING_OUT = {"broadcast", "barrier", "monitored_barrier", "broadcast_object_list"}  # from one rank to the others: adds nothing up
FEW = 16  # elements a step: losses and counters


class WeightsSharedGradientsNot(Check):
    code = "SYN135"
    name = "weights-shared-gradients-not"
    severity = Severity.ERROR
    provisional = True

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run)
        if facts.wrapped:
            raise NotApplicable("a model is wrapped in DistributedDataParallel")
        if not facts.same_opts or _unseen(run):
            raise NotApplicable("the ranks exchange more than torch.distributed's own calls show")
        for opt, parting in sorted(facts.partings.items()):
            differ = parting.steps >= 3 and parting.num_grad == parting.steps and not parting.num_param
            event = facts.params_event(opt)
            if not differ or event is None or _reduced(run) > FEW * run.num_steps:
                continue
            yield self.finding(
                f"the ranks' gradients differ at all of {parting.steps} steps and are never averaged; only the weights that come of them are "
                "shared out",
                where=event.where or facts.grad_site(opt),
                ranks=run.rank_ids,
                notes=[f"parameters agree after every step of {event['kind']}"],
                help="wrap the model: `model = DistributedDataParallel(model)`; a sharded optimizer averages no gradients",
            )
            return


def _reduced(run: Run) -> int:
    """Elements that the first rank gave to collectives which could carry gradients."""
    calls = [e for e in run.present[0].of("coll") if e["op"] not in SENDING_OUT]
    return sum(e["numel"] for e in calls if isinstance(e["numel"], int) and e["numel"] > 0)


def _unseen(run: Run) -> bool:
    """Point-to-point calls, sub-groups, objects at most steps, or more collectives on the default group than the script's calls account for."""
    first = run.present[0]
    if any(e["op"] in protocol.POINT_TO_POINT or e["world"] is False for e in first.of("coll")):
        return True
    seq, told = first.column("seq"), first.column("num_coll")
    hidden = seq[-1] - seq[0] - sum(told[1:]) if len(seq) > 1 and min(seq) >= 0 else 0
    objects = {e.step for e in first.of("coll") if str(e["op"]).endswith("_object")}
    return 2 * max(hidden, len(objects)) >= len(seq)
