"""SYN141 messages-average-nothing: the ranks send each other their gradients, and still step with different ones

What it does
    Looks for replicas that start equal and exchange, between every backward and its step, point-to-point messages as large as their
    parameters' gradients, and whose gradients differ between ranks at every step all the same.

Why it is bad
    An all-reduce of one's own (a ring, a tree, a gather by rank 0) is easily a little wrong: the buffer that is added is not the one that
    was received, it is read before the wait, one neighbour is left out. Every rank then trains a model of its own, and the loss still falls.

Wrong
    dist.recv(recv_buff, left)
    accum += recv                                     # another tensor than the one that was received

Right
    dist.recv(recv_buff, left)
    accum += recv_buff                                # or, with one call: dist.all_reduce(param.grad)

Known limits
    Messages that carry activations (stages of a pipeline), parameters (gossip), or one side's alone (a parameter server) are not judged,
    nor are runs that also reduce by collectives or write the parameters between the steps. The finding stands on the statement that receives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from harness.checks import regime
from harness.checks.base import Check, NotApplicable
from harness.checks.syn import gradients, replicas
from harness.model import Finding, Severity, Where
from harness.probe import protocol
from harness.record import Event, Recording, Run

MIN_STEPS = 3  # at which the exchange was seen, and the gradients' values
RECEIVES = {"recv", "irecv", "batch_isend_irecv"}


class MessagesAverageNothing(Check):
    code = "SYN141"
    name = "messages-average-nothing"
    severity = Severity.ERROR
    provisional = True
    explains = ("OPT111", "EVL102")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run, messages=True)
        if not any(e["op"] in protocol.POINT_TO_POINT for _, e in run.events("coll")):
            raise NotApplicable("the ranks send each other no point-to-point messages")
        if facts.wrapped or not regime.by_messages(run):
            return
        for opt, parting in sorted(facts.partings.items()):
            event = facts.params_event(opt)
            if opt == protocol.OPT_BY_HAND or event is None or not replicas.starts_equal(run, opt) or parting.steps < MIN_STEPS:
                continue
            if parting.num_grad < parting.steps or parting.num_param < parting.steps or not _only_messages(facts, sum(event["numels"] or ())):
                continue
            written, factor = gradients.written(run, opt)
            changed = bool(written) and factor is None
            if not all(_exchanges(r, event, in_pieces=changed) for r in run.present):
                continue
            if regime.writes_parameters(run, opt):
                raise NotApplicable("the parameters are written between the steps: gossip")
            yield self.finding(
                f"the ranks send each other gradients before every step, and the gradients differ at all of {parting.steps} steps all the same",
                where=_received_at(run) or facts.grad_site(opt, parting.grad_step),
                ranks=run.rank_ids,
                notes=[_note(run, written, factor)],
                help="add the buffer that was received, after its wait, for every neighbour once; or `dist.all_reduce(p.grad)`, then divide by the world's size",
            )
            return


def _note(run: Run, written: Sequence[int], factor: float | None) -> str:
    if factor is not None:
        return f"each rank's gradient is its own times {factor:.3g}: nothing of what it received is in it"
    if not written:
        return "each rank's gradient at the step is its own, as the backward left it"
    if len(written) == len(run.present):
        return "the gradients are written between the backward and the step, on every rank to other values"
    return f"only rank {', '.join(map(str, written))} of {len(run.present)} writes its gradients between the backward and the step"


def _only_messages(facts: replicas.Replicas, numel: int) -> bool:
    """Whether no collective carries what the messages do, and no sub-group is in use."""
    subgroups = any(e["world"] is False for r in facts.run.present for e in r.of("coll") if e.step >= 1)
    return bool(numel) and not subgroups and facts.hand_synced_numel < numel * max(1, facts.run.num_steps // 50 + 1)


def _exchanges(recording: Recording, params: Event, *, in_pieces: bool) -> bool:
    """Whether the messages between backward and step carry gradients: each parameter's size is among them, or all of them at once; where the gradients
    were really changed, as many elements in other pieces will do."""
    sizes: dict[int, Counter[int]] = {}
    for e in recording.of("coll"):
        if e["op"] in protocol.POINT_TO_POINT and e["graded"]:
            sizes.setdefault(e.step, Counter()).update(_numels(e))
    trained = [n for n, wanted in zip(params["numels"] or (), params["requires_grad"] or (), strict=False) if wanted]
    steps = [s for s in range(min(recording.num_steps, 6)) if s in sizes]
    return len(steps) >= MIN_STEPS and all(_covers(sizes[s], trained, in_pieces) for s in steps)


def _numels(event: Event) -> Sequence[int]:
    return [int(n) for n in event["each"] or [event["numel"]] if isinstance(n, int)]


def _covers(moved: Counter[int], trained: Sequence[int], in_pieces: bool) -> bool:
    total = sum(trained)
    if total in moved or (len(set(trained)) > 1 and set(trained) <= set(moved)):
        return True
    return in_pieces and sum(n * num for n, num in moved.items()) >= total


def _received_at(run: Run) -> Where | None:
    """The statement that receives most elements between a backward and its step."""
    moved: Counter[Where] = Counter()
    for _, e in run.events("coll"):
        if e["op"] in RECEIVES and e["graded"] and e.where is not None:
            moved[e.where] += sum(_numels(e))
    return moved.most_common(1)[0][0] if moved else None
