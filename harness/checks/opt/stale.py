"""OPT101 stale-optimizer: the optimizer holds parameters that the model no longer uses

What it does
    Looks for optimizers whose parameters never receive a gradient, or whose parameters no living module owns while a module has a
    successor of the same shape. Also for one that was left behind in mid-run: from some step on none of its gradients is new, while the
    loss goes over to parameters that no optimizer holds. Or for one that holds gathered parameters of FSDP2 instead of their shards.

Why it is bad
    The optimizer was built before the model was copied, converted or re-wrapped, or a parameter was replaced after it was built:
    the loss stays flat (or a part of the model stays untrained), without a word.

Wrong
    optimizer = SGD(model.parameters(), lr=0.1)
    model = copy.deepcopy(model)

    fully_shard(model)
    validate(model)                                        # the root stays gathered until a backward
    optimizer = SGD(model.parameters(), lr=0.1)

Right
    model = copy.deepcopy(model)
    optimizer = SGD(model.parameters(), lr=0.1)

    fully_shard(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    validate(model)

Known limits
    An optimizer that is stepped only once is not judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks.base import Check, NotApplicable
from harness.checks.opt import optimizers
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.probe.protocol import FLAG_ALL_NONE
from harness.record import Event, Run, texts


class StaleOptimizer(Check):
    code = "OPT101"
    name = "stale-optimizer"
    severity = Severity.ERROR
    explains = ("OPT102", "OPT113", "OPT121", "OPT122", "SYN101", "SYN126")

    def end(self, run: Run) -> Iterable[Finding]:
        rows = optimizers.by_opt(run)
        if not rows:
            raise NotApplicable("no optimizer step was recorded")
        for (rank, opt), steps in sorted(rows.items()):
            event = optimizers.params_event(run, rank, opt)
            if event is None or len(steps) < 2:
                continue
            ranks = optimizers.ranks_of(rows, opt)
            found = (
                self._gathered(event, ranks)
                or self._never(run, rank, opt, event, steps, ranks)
                or self._left_behind(run, rank, opt, event, steps, ranks)
                or self._orphaned(run, rank, opt, event, ranks)
            )
            if found is not None:
                yield found
                return

    def _gathered(self, event: Event, ranks: Sequence[int]) -> Finding | None:
        """FSDP2 reduces gradients into the shards, and gives the memory of gathered parameters back."""
        gathered = texts(event["gathered"])
        if not gathered:
            return None
        num = len(event["names"] or ())
        return self.finding(
            f"{len(gathered)} of the {num} parameters of the {event['kind']} optimizer are gathered (unsharded) ones of fully_shard, not the "
            "model's own shards: they never get a gradient, and are not trained",
            where=event.where,
            ranks=ranks,
            notes=[replicas.listed(gathered), "the optimizer was made while they were gathered: behind a forward (the root module stays so) or `unshard()`"],
            help="build the optimizer behind `fully_shard` and before any forward, or call `model.reshard()` first",
        )

    def _never(self, run: Run, rank: int, opt: int, event: Event, steps: Sequence[int], ranks: Sequence[int]) -> Finding | None:
        """No gradient ever came. `steps`: row numbers of this optimizer's steps."""
        recording = run.ranks[rank]
        flags = recording.column("flags") if recording is not None else []
        if not all(flags[i] & FLAG_ALL_NONE for i in steps) or optimizers.had_gradients(run, rank, opt):
            return None
        if event["sharded"]:
            return self.finding(
                f"no shard of the {event['kind']} optimizer ever received a gradient in {len(steps)} steps: gradients are never "
                "reduced into the shards, or the loss does not use them",
                where=optimizers.step_site(run, rank, opt) or event.where,
                ranks=ranks,
                help="let the last backward before a step synchronise: `model.set_requires_gradient_sync(True)`",
            )
        return self.finding(
            f"no parameter of the {event['kind']} optimizer ever received a gradient in {len(steps)} steps: it "
            "holds parameters that the loss does not use",
            where=event.where,
            ranks=ranks,
            notes=[f"{len(event['names'] or ())} parameters, {sum(not o for o in event['owned'] or ())} of them in no living module"],
            help="build the optimizer after the model has its final form (copied, moved, wrapped, converted)",
        )

    def _left_behind(self, run: Run, rank: int, opt: int, event: Event, steps: Sequence[int], ranks: Sequence[int]) -> Finding | None:
        """From some step on the gradients went to other parameters."""
        left = optimizers.left_behind(run, rank, opt, steps)
        if left is None:
            return None
        return self.finding(
            f"from step {left.step} on the {event['kind']} optimizer trains nothing: its parameters are no longer those of the "
            f"model, whose {left.num} parameters receive the gradients and are in no optimizer",
            where=left.made or event.where,
            ranks=ranks,
            notes=[f"{left.steps} steps without a new gradient", *([replicas.listed(left.names)] if left.names else [])],
            help="build the optimizer again when the model is, and load its state; or load into the model that is there",
        )

    def _orphaned(self, run: Run, rank: int, opt: int, event: Event, ranks: Sequence[int]) -> Finding | None:
        """Some of its parameters were replaced in their module."""
        lost = optimizers.orphaned(run, rank, opt)
        if not lost:
            return None
        return self.finding(
            f"the {event['kind']} optimizer trains {len(lost)} parameters that no module owns any more",
            where=optimizers.rebind_site(run) or event.where,
            ranks=ranks,
            notes=[replicas.listed(lost), "they never received a gradient"],
            help="change parameters in place (`with torch.no_grad(): p.copy_(...)`), or build the optimizer afterwards",
        )
