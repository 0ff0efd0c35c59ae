"""How many autograd graphs are still alive. A loss kept without `.detach()` keeps its graph: memory climbs a step at a time.

A token is put into the metadata dict of the root node, which lives exactly as long as the node. Nothing of the user's is kept alive.
Event "graphs": alive, mode ("train" | "eval"), site, keeper (site of the statement that keeps them, by
reading the source) or null; written when the number alive reaches 8, 16, 32, ...
Event "eval_graphs" (end of an evaluation whose forwards made graphs): forwards, peak (graphs alive at once), used (a later backward
reaches them), site, keeper.
"""

from __future__ import annotations

from typing import Any

from .. import digests, keepers, protocol, sites
from ..arm import at_close
from ..patching import quiet
from ..state import S


class _Token:
    """Its end is the node's. A finalizer of the weakref module would cost 3 us more."""

    __slots__ = ("mode", "step", "weight")

    def __init__(self, mode: str, weight: int) -> None:
        self.mode, self.weight = mode, weight
        self.step = S.steps if weight > 1 else -1
        if self.step < 0:
            _alive[mode] += 1
        else:
            _grow_old(self.step)
            _young[mode] += 1
        _sum_up()

    def __del__(self) -> None:
        try:
            if self.step < 0:
                _alive[self.mode] -= 1
            elif self.step == _young_step[0]:
                _young[self.mode] -= 1
            else:
                _alive[self.mode] -= self.weight
            _sum_up()
        except (TypeError, AttributeError):  # the interpreter is coming down and has emptied this module
            return


# graphs alive by what bears the token: the loss's root, the root of a model's output, the node nearest to the leaves (kept too where only
# an intermediate output is kept, by a forward hook), and outputs in eval mode
_alive: dict[str, int] = {"loss": 0, "output": 0, "depth": 0, "eval": 0}
_young = dict.fromkeys(_alive, 0)  # tokens that stand for several steps, of the last step that was counted: kept or not is seen at the next one
_young_step = [-1]
# what the step in work is taken to have, the same until the next one that is counted: a number that jumped up there and fell behind it would look like
# a climb, and cut a real one into pieces
_in_work = dict.fromkeys(_alive, 0)
ALL_STEPS = 256  # from then on the graph of one training step in EVERY bears tokens; a token costs 10 us with what it takes to free it
EVERY = 16
# from then on one step in four bears tokens, but for the loss's own: the walk to the leaves costs 75 us in a model of 60 layers
LATER, LATER_EVERY = protocol.EVERY_GRAPH, 4
_told: dict[str, int] = {"train": 4, "eval": 4}
_KEY = "_harness_token"
MAX_NODES = 5000
MAX_HOPS = 256
TRANSPOSES = ("TBackward0", "TransposeBackward0", "PermuteBackward0")  # a parameter stands behind them


class Evaluation:
    """Forwards in eval mode with gradients on, from the first one to the next train() and backward."""

    def __init__(self) -> None:
        self.before = max(0, _alive["eval"] - 1)
        self.backwards = S.backwards
        self.forwards = self.peak = 0
        self.look_at = 3  # graphs kept when we first ask who keeps them
        self.site = sites.UNKNOWN
        self.keeper: dict[str, Any] | None = None
        self.over = False  # train() was called


_evaluation: list[Evaluation] = []


def _keeper(site: sites.Site) -> dict[str, Any] | None:
    found = keepers.statement(site)
    return sites.as_json(found) if found is not None else None


def _sum_up() -> None:
    had, works = _alive, _in_work  # written out: twice a token
    S.graphs_alive = max(had["loss"] + works["loss"], had["output"] + works["output"], had["depth"] + works["depth"], had["eval"] + works["eval"])


def _grow_old(step: int) -> None:
    """What is alive of an earlier step stands for as many graphs that are kept as steps go without a token."""
    if step != _young_step[0]:
        weight = EVERY if _young_step[0] >= ALL_STEPS else LATER_EVERY
        _young_step[0] = step
        for mode, num in _young.items():
            _alive[mode] += weight * num
            _young[mode] = 0
        if step >= ALL_STEPS:
            _in_work.update(dict.fromkeys(_in_work, 1))


def note_row(step: int) -> None:
    """A row is written: what the step still has then, one that bears tokens has for those behind it too."""
    if step == _young_step[0] and step < ALL_STEPS:
        _in_work.update(_young)
        _sum_up()


def due(step: int) -> bool:
    """Whether the graphs of a training step are counted; not at a fixed remainder, since a script that keeps every tenth loss has a beat too."""
    return step < ALL_STEPS or step % EVERY == step // EVERY * 5 % EVERY


def idle() -> bool:
    """Whether nothing is to be done at a training step's forward or backward."""
    return not _evaluation and not due(S.steps)


def _weight(step: int) -> int:
    """How many graphs a token of an output, or near the leaves, stands for at this step once it has grown old; 0: none is put there."""
    if step < LATER:
        return 1
    if step >= ALL_STEPS:
        return EVERY
    return LATER_EVERY if step % LATER_EVERY == step // LATER_EVERY % LATER_EVERY else 0


def _bear(node: Any, kind: str, weight: int) -> bool:
    """Put a token into a node; False where it has one."""
    table = node.metadata
    if _KEY in table:
        return False
    table[_KEY] = _Token(kind, weight)
    return True


def _nearest_to_leaves(node: Any) -> Any:
    """Down the graph along its first branch; about 0.6 us a node, at most 256 nodes. torch makes `next_functions` anew each time it is asked."""
    following = node.next_functions
    for _ in range(MAX_HOPS):
        chosen = None
        for below, _ in following:
            beyond = below.next_functions if below is not None else ()
            if beyond and (chosen is None or type(below).__name__ not in TRANSPOSES):
                chosen = below, beyond
                if type(below).__name__ not in TRANSPOSES:
                    break
        if chosen is None:
            break
        node, following = chosen
    return node


def _first(output: Any) -> Any:
    """The first tensor in what a model returned, or a loss."""
    return output if isinstance(output, digests.tensor_kind()) else next(iter(digests.of_batch(output)[:1]), None)


def watch(output: Any, mode: str) -> None:
    """Count the graph behind `output` as alive until its root node is freed."""
    if mode == "train" and idle():
        return
    if _evaluation and mode == "train" and S.backwards > _evaluation[0].backwards:
        _settle(output)
    tensor = _first(output)
    node = tensor.grad_fn if tensor is not None else None
    if node is None:
        return
    kind = "eval" if mode == "eval" else "loss" if tensor.numel() == 1 else "output"
    weight = _weight(S.steps)
    if kind == "output" and not weight:
        return
    # a loss's own costs little: every one has it until ALL_STEPS
    if not _bear(node, kind, 1 if kind == "eval" or (kind == "loss" and S.steps < ALL_STEPS) else weight):
        return
    if kind == "eval":
        _evaluated()
    elif kind == "loss" and weight:
        _bear(_nearest_to_leaves(node), "depth", weight)
    if S.graphs_alive >= 2 * _told[mode]:
        _tell_growth(mode, _alive["eval"] if mode == "eval" else S.graphs_alive)


def _tell_growth(mode: str, alive: int) -> None:
    if alive >= 2 * _told[mode]:
        _told[mode] = alive
        site = sites.here(5)
        S.recorder.event("graphs", site, alive=alive, mode=mode, keeper=_keeper(site))


def _evaluated() -> None:
    """One more forward of an evaluation has made a graph."""
    if not _evaluation or _evaluation[0].over:
        _evaluation[:] = [Evaluation()]
    now = _evaluation[0]
    now.forwards += 1
    kept = _alive["eval"] - now.before
    now.peak = max(now.peak, kept)
    now.site = sites.here(4)
    if kept >= now.look_at:
        now.look_at *= 4
        now.keeper = _keeper(now.site)


def training_again() -> None:
    """train() was called: the evaluation is over. Whether its graphs were meant for a backward is seen at the next one."""
    if _evaluation:
        _evaluation[0].over = True


def _settle(loss: Any) -> None:
    now = _evaluation.pop()
    if now.forwards > 2:
        _tell(now, used=_alive["eval"] > 0 and _reaches_evaluation(loss))


def _tell(now: Evaluation, used: bool) -> None:
    S.recorder.event("eval_graphs", now.site, forwards=now.forwards, peak=now.peak, used=used, keeper=now.keeper)


def _reaches_evaluation(loss: Any) -> bool:
    """Whether the graph of this loss holds a node that an evaluation made: then the graphs were kept on purpose."""
    todo: list[Any] = [getattr(loss, "grad_fn", None)]
    seen: set[Any] = set()
    while todo and len(seen) < MAX_NODES:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        token = node.metadata.get(_KEY)
        if token is not None and token.mode == "eval":
            return True
        todo.extend(n for n, _ in node.next_functions)
    return False


def _finish() -> None:
    if _evaluation and _evaluation[0].forwards > 2:
        _tell(_evaluation.pop(), used=False)


def arm() -> None:
    """Backward and DDP's forward call `watch`; modes.py calls it for other modules in eval mode."""
    at_close.append(quiet(_finish))
