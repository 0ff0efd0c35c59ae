"""Which parameters of a DDP object that searches for unused ones are reached by the loss: is the search needed?

Only where find_unused_parameters is on and the graph is not static; the first 16 backwards, then every 8th up to the 256th. A walk costs
about 1 us a node of the graph, as DDP's own search does.
Event "used": index, num (trainable when wrapped), unused [names, at most 20], complete (the walk saw the whole graph).
"""

from __future__ import annotations

from typing import Any

from ..state import S
from . import backward, manual


def _before_backward(loss: Any) -> None:
    number = S.backwards
    if not S.ddps or number > 256 or (number > 16 and number % 8) or loss.grad_fn is None:
        return
    searching = [w for w in S.ddps if (m := w.ref()) is not None and m.find_unused_parameters and not getattr(m, "static_graph", False)]
    searching = [w for w in searching if w.forwards]
    if not searching:
        return
    reached = manual.leaves(loss)
    for wrapped in searching:
        wanted = [key for key, grad in wrapped.grad.items() if grad]
        unused = [wrapped.names[key] for key in wanted if key not in reached]
        S.recorder.event(
            "used", index=wrapped.index, num=len(wanted), unused=unused[:20], num_unused=len(unused), complete=len(reached) > 0
        )


def arm() -> None:
    backward.at_backward.append(_before_backward)
