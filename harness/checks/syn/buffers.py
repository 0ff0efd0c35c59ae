"""SYN116 buffer-not-reduced: buffers that the model computes from its local batch differ between ranks

What it does
    Compares floating point buffers that are not a normalisation's own statistics after training forwards, all buffers in evaluation, and those
    of a module without parameters whose output goes into the trained model. Where the script averages weights or gradients by hand and wraps nothing:
    the running statistics of the normalisation layers, where all ranks measure with equal weights and statistics a quarter of a deviation and more
    apart, reduce numbers then, and one rank alone saves its own.

Why it is bad
    A codebook, a running mean or an EMA that is updated in forward follows each rank's own shard. DDP's broadcast gives everybody
    rank 0's, so the other shards never count; with broadcast_buffers=False every rank evaluates another model.

Wrong
    self.ema.mul_(0.9).add_(x.mean(0), alpha=0.1)

Right
    batch_mean = x.mean(0)
    dist.all_reduce(batch_mean); batch_mean /= dist.get_world_size()
    self.ema.mul_(0.9).add_(batch_mean, alpha=0.1)

Known limits
    Advice where the script itself broadcasts or reduces these buffers, tensor by tensor, in the course of the training, and not once at its beginning (the
    first entries of a codebook): it knows them to be the ranks' own.
    BatchNorm statistics that differ between two training forwards are normal and silent. So are buffers that are equal in the longer rest of the
    run: memory that differed until the script had filled it, a bank that all ranks fill alike for one. Averages by hand: CPU only, and only where the
    saved statistics are those of an evaluation. Clients that keep their statistics on purpose (FedBN, SiloBN) save their own each, or have other scales too: silent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import own_statistics, replicas
from harness.model import Finding, Severity
from harness.record import Event, Run, where_of

LONG = 8  # steps with equal buffers after the last with unequal ones: fewer may be the broadcast of an evaluation


class BufferNotReduced(Check):
    code = "SYN116"
    name = "buffer-not-reduced"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        if (apart := own_statistics.find(run)) is not None:
            yield self._by_hand(run, apart)
            return
        replicas.require(run)
        if (found := self._fed(run)) is not None:
            yield found
            return
        replicas.require(run, ddp=True)
        wraps = [e for _, e in run.events("wrap")]
        if not any(e["buffers"] for e in wraps):
            raise NotApplicable("the wrapped model has no buffers")
        differing = _differing(run)
        if len(differing) >= 2:
            if not run.live or any(r.of("evaluated") or len(r.of("pass")) > 1 for r in run.present):  # what is sent once an epoch is not sent before
                yield self._followed(run, wraps[0], differing)
            return
        columns = [r.of("wrap_eval") for r in run.present]
        for events in zip(*columns, strict=False):
            tables = [e["buffers"] or {} for e in events]
            wrong = [n for n in tables[0] if len({t.get(n) for t in tables}) > 1]
            inner = bool(events[0]["inner"]) and bool(wraps[0]["broadcast_buffers"])  # statistics one step apart: small, and common
            if wrong:
                yield self.finding(
                    f"evaluation runs with buffers that differ between ranks: {replicas.listed(wrong)}",
                    where=events[0].where,
                    ranks=run.rank_ids,
                    severity=Severity.ADVICE if inner else None,
                    notes=[f"broadcast_buffers={wraps[0]['broadcast_buffers']}"],
                    help="keep broadcast_buffers=True, use SyncBatchNorm, or average the buffers before evaluating",
                )
                return

    def _followed(self, run: Run, wrap: Event, differing: Sequence[int]) -> Finding:
        known = _sent_on(run, wrap, differing[len(differing) // 2])
        place = f"{known['op']} at {known.where.place}" if known is not None and known.where is not None else ""
        return self.finding(
            f"buffers that forward updates differ between ranks after {len(differing)} steps: each follows its own shard",
            where=where_of(wrap["own_buffer_site"]) or wrap.where,
            ranks=run.rank_ids,
            severity=None if known is None else Severity.ADVICE,
            notes=[
                f"buffers: {replicas.listed(wrap['own_buffers'] or wrap['buffers'] or [])}",
                *([f"the script makes them equal itself now and then ({place}): it knows them to be the ranks' own"] if place else []),
            ],
            help="all-reduce the statistic inside forward before it enters the buffer",
        )

    def _by_hand(self, run: Run, apart: own_statistics.Apart) -> Finding:
        saved = f" at line {apart.saved.where.line}" if apart.saved.where else ""
        return self.finding(
            "the ranks' weights are averaged by hand, the running statistics of their normalisation layers are not: one model is measured with statistics"
            f" that differ between ranks, and rank {apart.saver} saves its own",
            where=apart.averaged or apart.evaluated.where,
            ranks=run.rank_ids,
            notes=[f"the running means of {apart.layer or 'the model'} are {apart.gap:.1f} deviations apart", f"rank {apart.saver} saves{saved}"],
            help="average running_mean and running_var with the weights, as `model.state_dict()` holds them, or use SyncBatchNorm",
        )

    def _fed(self, run: Run) -> Finding | None:
        """A module beside the trained model, whose output goes into it: its buffers move in every step, on each rank their own way."""
        columns = [r.of("feeder") for r in run.present]
        for events in zip(*columns, strict=False):
            one = events[0]
            moved = all(e["early"] != e["late"] for e in events) and len({e["module"] for e in events}) == 1
            if len(events) > 1 and moved and len({e["late"] for e in events}) > 1:
                return self.finding(
                    f"the buffers of {one['module']}, whose output the trained model gets, differ between ranks: each follows its own data",
                    where=where_of(one["made"]),
                    ranks=run.rank_ids,
                    notes=[f"buffers: {replicas.listed(one['buffers'] or [])}"],
                    help="all-reduce the statistic before it enters the buffer, or put the module into the wrapped model and reduce it in forward",
                )
        return None


def _differing(run: Run) -> list[int]:
    """Steps whose forward left other buffers on other ranks; none where they have been equal for longer since."""
    looked = [(s.index, s.same("buffer")) for s in run.steps() if s.complete and s.taken("buffer") and all(s.number("num_forward"))]
    found = [index for index, same in looked if not same]
    since = sum(index > found[-1] for index, _ in looked) if found else 0
    return [] if found and since >= LONG and since > len(found) else found


def _sent_on(run: Run, wrap: Event, middle: int) -> Event | None:
    """A collective of one of these buffers, where each of them is sent at several steps, or in the second half."""
    own = {str(n) for n in wrap["own_buffers"] or ()}
    sent = {n: [e for _, e in run.events("coll") if e.step and e["buffer"] == n] for n in own}
    on = [len({e.step for e in events}) > 1 or any(e.step >= middle for e in events) for events in sent.values()]
    return sent[min(own)][-1] if own and all(on) else None
