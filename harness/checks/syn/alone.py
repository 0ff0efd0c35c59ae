"""SYN126 replicas-train-alone: several ranks train, and nothing synchronises their gradients

What it does
    Looks for a job of several ranks with a process group whose models are not in DDP, whose gradients differ at every step, and
    which issues no collective large enough to carry gradients or parameters. A loss that is all-reduced before its backward is named as the cause: its
    gradient is still the rank's own.

Why it is bad
    Each rank trains its own model on its own shard; only one of them is saved. The loss falls, as on a smaller data set.

Wrong
    dist.init_process_group('gloo')
    model = Net()                       # the wrap was forgotten

Right
    model = DDP(Net())

Known limits
    Ranks that do different work by design (no shared data, no process group) are not judged. Advice where no sampler shares the data out
    and every rank seeded torch with a value of its own and started from other parameters (an ensemble, parallel chains), has other
    hyper-parameters from its first step on (a search by rank), or draws the same batches as all others (the models differ, not the data).
    So are folds of a cross-validation that loaders show: each rank holds out other samples, and the other ranks train on them. Where no loader shows
    it, folds that are dealt by rank look like a forgotten wrap. What would be advice is silent where one rank comes to its end with one model more than
    another (five folds over two ranks). Weights that travel as objects count where as many numbers are gathered as the model has, and later optimizers
    start from parameters that all ranks have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import members, replicas
from harness.model import Finding, Severity, Where
from harness.probe import protocol
from harness.record import Run, number, where_of

AVERAGING = {"all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "reduce_scatter", *protocol.REDUCE_SCATTER_INTO}


class ReplicasTrainAlone(Check):
    code = "SYN126"
    name = "replicas-train-alone"
    severity = Severity.ERROR
    provisional = True
    explains = ("SYN127", "OPT111", "SYN129", "EVL102")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run)
        if facts.wrapped:
            raise NotApplicable("a model is wrapped in DistributedDataParallel")
        if not all(any(e["done"] and (e["world_size"] or 0) > 1 for e in r.of("pg")) for r in run.present):
            raise NotApplicable("no process group of several ranks")
        if any(e["op"] in protocol.POINT_TO_POINT or e["world"] is False for _, e in run.events("coll") if e.step >= 1):
            raise NotApplicable("subgroups or point-to-point calls are in use: another kind of parallelism")
        for opt, parting in sorted(facts.partings.items()):
            event = facts.params_event(opt)
            numel = sum(event["numels"] or ()) if event else 0
            alone = parting.num_param == parting.steps and (parting.num_grad == parting.steps or opt == protocol.OPT_BY_HAND)
            little = facts.hand_synced_numel < numel * max(1, parting.steps // 50 + 1) and not _round(run, numel)
            if numel and alone and parting.steps >= 2 and little:
                meant = members.on_purpose(run, opt)
                if meant and members.dealt_out(run):
                    raise NotApplicable("the ranks train other numbers of models: members, or folds, that were dealt out")
                loss = _reduced_loss(run, facts.grad_site(opt))
                why = (
                    "the loss is all-reduced before backward(), which averages no gradient"
                    if loss
                    else "no gradient or parameter is ever synchronised"
                )
                yield self.finding(
                    f"{run.world_size} ranks train {run.world_size} separate models: {why}",
                    where=loss or (event.where if event else None) or facts.grad_site(opt),
                    ranks=run.rank_ids,
                    severity=Severity.ADVICE if meant else None,
                    notes=[f"gradients and parameters differ at all of {parting.steps} steps"],
                    help=("call backward() on the rank's own loss, all-reduce `loss.detach()` for the log only, and average the gradients: " if loss else "")
                    + "wrap the model: `model = DistributedDataParallel(model)`",
                )
                return


def _reduced_loss(run: Run, backward: Where | None) -> Where | None:
    """Where a loss goes into a reduction before its backward, at nearly every step: the call in the function that calls backward, else the reduction."""
    told = [e for e in run.present[0].of("coll") if e["graphed"] and e["op"] == "all_reduce" and e["numel"] == 1 and not e["inside"]]
    if len({e.step for e in told}) < 0.9 * run.num_steps:
        return None
    frames = [w for f in told[0]["graphed"] if (w := where_of(f)) is not None] if isinstance(told[0]["graphed"], list) else []
    beside = (f for f in frames if backward is not None and (f.file, f.function) == (backward.file, backward.function))
    return next(beside, told[0].where)


def _round(run: Run, numel: int) -> bool:
    """Whether as much as the model was reduced or broadcast between two steps: rounds of local steps may be longer than what is hashed."""
    moved: Counter[int] = Counter()
    for e in run.present[0].of("coll"):
        if e["op"] in AVERAGING and isinstance(e["numel"], int) and 1 <= e.step < run.num_steps:
            moved[e.step] += e["numel"]
    return max(moved.values(), default=0) >= numel or (_parcels(run, numel) and _come_together(run))


def _parcels(run: Run, numel: int) -> bool:
    """Objects that hold as many numbers as the model: weights that the ranks average by themselves, or predictions of a test set."""
    return any("object" in str(e["op"]) and number(e["leaves"]) >= numel and e.step >= 1 for e in run.present[0].of("gathered"))


def _come_together(run: Run) -> bool:
    """Whether an optimizer that is made later on starts, on all ranks, from parameters that none of the first had."""
    starts = [{tuple(e["each"] or ()): e.step for e in reversed(r.of("initial"))} for r in run.present]
    first = {values for table in starts for values, step in table.items() if step == 0}
    return bool(set.intersection(*(set(table) for table in starts)) - first)
