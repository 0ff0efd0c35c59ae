"""How the ranks share their work, where it is not data parallelism over replicas: nothing then has to be equal at every step."""

from __future__ import annotations

from harness.probe import protocol
from harness.record import Event, Recording, Run, texts


def other(run: Run) -> str:
    """Why replicas are not to be compared; empty where the ranks train replicas of one model, or mean to."""
    found = run.__dict__.get("_regime")
    if not isinstance(found, str):
        found = run.__dict__["_regime"] = _other(run)
    return found


def _other(run: Run) -> str:
    if sharded(run):
        return "parameters are sharded (DTensor): each rank holds a part"
    if any(True for _ in run.events("model_averager")) or any(e["name"] == "post_localSGD_hook" for _, e in run.events("comm_hook")):
        return "local SGD: the ranks' models part on purpose and are averaged now and then"
    if _shared_out(run):
        return "each rank's optimizer holds a part of the parameters"
    if _teams(run):
        return "models are wrapped over groups of the ranks, and each group trains another one (an ensemble, or slices of one model)"
    if _strangers(run):
        return "the ranks train different models (stages of a pipeline, or experts)"
    return ""


def sharded(run: Run) -> bool:
    """DTensor: what a backward reaches is another object than what the optimizer holds. Asked once for each rank, so looked up once."""
    found = run.__dict__.get("_sharded")
    if not isinstance(found, bool):
        found = run.__dict__["_sharded"] = any(e["sharded"] for _, e in run.events(protocol.PARAMS))
    return found


def by_messages(run: Run) -> bool:
    """Whether the ranks send each other tensors at several steps."""
    return any(len({e.step for e in r.of("coll") if e["op"] in protocol.POINT_TO_POINT}) >= 2 for r in run.present)


def writes_parameters(run: Run, opt: int) -> bool:
    """Whether some rank's parameters are others before a step than after the one before it, more often than once: gossip, or averaging."""
    return any(_num_written(r, opt) > 1 for r in run.present)


def _num_written(recording: Recording, opt: int) -> int:
    before = {e.step: e["digest"] for e in recording.of("before") if e["opt"] == opt}
    after = {step + 1: values for (step, o), (_, values) in recording.details.items() if o == opt}
    return sum(before[s] != protocol.digest_of(after[s]) for s in before.keys() & after.keys())


def by_rows(run: Run) -> bool:
    """Whether the ranks deal out rows by all_to_all at several steps: experts or tables that belong to one rank each."""
    return any(len({e.step for e in r.of("coll") if str(e["op"]).startswith("all_to_all")}) >= 2 for r in run.present)


def by_backward(run: Run) -> bool:
    """Whether the script's own backward (an autograd.Function's) sends the ranks messages, or gathers from all of them, at several steps: gradients go
    home to the ranks whose parameters made what they belong to. A forward that is run anew within the backward gathers from its own line."""
    return any(len(_homeward(r)) >= 2 for r in run.present)


def by_library(run: Run) -> bool:
    """So the backward of torch.distributed.nn's all_gather does at several steps. It does it for a head before the gather as well."""
    told = [[e for e in r.of("coll") if e["inside"] and not e["hook"] and str(e["op"]).startswith(("scatter", "reduce_scatter"))] for r in run.present]
    return any(len({e.step for e in events}) >= 2 for events in told)


def _homeward(recording: Recording) -> set[int]:
    told = [e for e in recording.of("coll") if e["op"] in protocol.POINT_TO_POINT or str(e["op"]).startswith("all_gather")]
    forward = {e.where for e in told if not e["inside"] and e["op"] not in protocol.POINT_TO_POINT}
    return {e.step for e in told if e["inside"] and not e["hook"] and e.where not in forward}


def _strangers(run: Run) -> bool:
    """No model is wrapped, and the first optimizers hold other shapes on every rank: nothing could be averaged."""
    if any(True for _ in run.events("wrap")):
        return False
    first = _first_params(run)
    return len(first) == len(run.present) > 1 and len({repr(e["shapes"]) for e in first}) == len(first)


def _teams(run: Run) -> bool:
    """DDP over groups of ranks that do not start with one model. Groups that do are told by SYN130: two models come of one."""
    teams: dict[str, str] = {}
    for recording in run.present:
        wraps = recording.of("wrap")
        if not wraps or not wraps[0]["group_ranks"]:
            return False
        began = repr((wraps[0]["names"], wraps[0]["numels"], wraps[0]["each"]))
        if teams.setdefault(repr(wraps[0]["group_ranks"]), began) != began:
            return False  # within a group DDP has broadcast: something else is wrong
    return len(teams) > 1 and len(set(teams.values())) > 1


def _shared_out(run: Run) -> bool:
    """The ranks' optimizers hold parameters of other names: each steps its part and sends it to the others."""
    names = [set(texts(e["names"])) for e in _first_params(run)]
    return len(names) > 1 and all(len(names[0] & other) < 0.5 * max(1, min(len(names[0]), len(other))) for other in names[1:])


def _first_params(run: Run) -> list[Event]:
    return [r.of(protocol.PARAMS)[0] for r in run.present if r.of(protocol.PARAMS)]
