"""Running statistics of normalisation layers, as a model is measured with and as they are saved: whose are they, where nobody wraps the model?

Fields of the event "evaluated" (evaluation.py; the first 256): stats (digest of all running means and variances, 0: none, or not on the CPU), params
(digest of the parameters beside them), layers (of up to 4 layers, spread over the model, in the first 16: [name, means, variances], up to 16 channels).
Event "statistics_saved" (at torch.save, one for each state dict in it; first 32): site, path, stats (digest, of the same kind).
Nothing is looked at while one process trains alone, or a model is wrapped: ddp.py looks there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from .. import digests, sites
from ..patching import contained
from ..state import S
from . import saving

MAX_LAYERS, MAX_CHANNELS, MAX_LOOKS, MAX_MODULES, MAX_SAVES, MAX_EVALUATIONS = 4, 16, 16, 2000, 32, 256
_num_looks, _num_saves = [0], [0]


def of(model: Any) -> tuple[int, int, list[Any]]:
    """(digest, that of the parameters, a few layers) of what a model is evaluated with; about 4 us a tensor."""
    found = _statistics(model) if not S.ddps and _num_looks[0] < MAX_EVALUATIONS and _shared_work() else []
    if not found:
        return 0, 0, []
    params = [p for p in model.parameters() if _readable(p)]
    _num_looks[0] += 1
    stride = -(-len(found) // MAX_LAYERS)
    some = found[::stride] if _num_looks[0] <= MAX_LOOKS else []
    return _digest([t for _, *pair in found for t in pair]), _digest(params), [[name, _numbers(mean), _numbers(var)] for name, mean, var in some]


def _shared_work() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _statistics(model: Any) -> list[tuple[str, Any, Any]]:
    found = []
    for name, module in itertools.islice(model.named_modules(), MAX_MODULES):
        buffers = vars(module).get("_buffers") or {}
        mean, var = buffers.get("running_mean"), buffers.get("running_var")
        if mean is not None and var is not None:
            if not _readable(mean) or not _readable(var):
                return []
            found.append((name, mean, var))
    return found


def _readable(tensor: Any) -> bool:
    return digests.plain(tensor) and tensor.is_cpu and tensor.is_floating_point() and tensor.numel() > 0


def _digest(tensors: Sequence[Any]) -> int:
    return digests.of_tensors(tensors)[0]


def _numbers(tensor: Any) -> list[float]:
    flat = tensor.detach().flatten()
    return [round(float(v), 6) for v in flat[:: -(-flat.numel() // MAX_CHANNELS)].tolist()]


@contained
def _at_save(thing: Any, site: sites.Site, path: str) -> None:
    if _num_saves[0] >= MAX_SAVES or not _shared_work():
        return
    by_dict: dict[str, list[Any]] = {}
    for name, tensor in saving.walk(thing):
        if name.endswith(("running_mean", "running_var")):
            by_dict.setdefault(name.rpartition("/")[0], []).append(tensor)
    for tensors in by_dict.values():
        if all(map(_readable, tensors)):
            _num_saves[0] += 1
            S.recorder.event("statistics_saved", site, path=path, stats=_digest(tensors))


def arm() -> None:
    saving.at_save.append(_at_save)
