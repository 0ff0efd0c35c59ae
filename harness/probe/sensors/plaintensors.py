"""Plain tensors that modules of a wrapped model draw in their constructor and read in forward: no parameters and no buffers, so DDP leaves them.

Event "plain_tensors" (once a wrap, before the third step): index, group_size, tensors [{name, module, first, now (digests after the wrap and
now), drawn (the statement of the constructor)}].
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from .. import digests, drawn, sites
from ..patching import after
from ..state import S
from . import steps

MAX_TENSORS, MAX_MODULES, LOOKED_AT = 32, 2000, 2
_wraps: list[list[Plain]] = []
_told = [False]


@dataclass
class Plain:
    """One attribute of one module."""

    module: weakref.ref[Any]
    name: str
    attribute: str
    drawn: sites.Site
    first: int


def _after_init(result: Any, wrapper: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    group = wrapper.process_group.size()
    _wraps.append(_of(module) if not _told[0] else [])
    _sizes.append(group)


_sizes: list[int] = []


def _of(model: Any) -> list[Plain]:
    found: list[Plain] = []
    known: dict[type, dict[str, sites.Site]] = {}
    for number, (name, module) in enumerate(model.named_modules()):
        if number >= MAX_MODULES or len(found) >= MAX_TENSORS:
            break
        kind = type(module)
        if kind.__module__.startswith("torch."):
            continue
        if kind not in known:
            known[kind] = drawn.attributes(kind)
        for attribute, at in known[kind].items():
            value = _value(module, attribute)
            if value is not None:
                found.append(Plain(weakref.ref(module), f"{name}.{attribute}".lstrip("."), attribute, at, _digest(value)))
    return found


def _value(module: Any, attribute: str) -> Any:
    import torch

    value = vars(module).get(attribute)
    return value if type(value) is torch.Tensor and not value.requires_grad and value.numel() > 1 and digests.plain(value) else None


def _digest(value: Any) -> int:
    return digests.of_tensors([value])[1][0]


def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    if _told[0] or S.steps < LOOKED_AT:
        return
    _told[0] = True
    for index, plain in enumerate(_wraps):
        living = [(one, module, value) for one in plain if (module := one.module()) is not None and (value := _value(module, one.attribute)) is not None]
        if living:
            S.recorder.event(
                "plain_tensors", index=index, group_size=_sizes[index],
                tensors=[
                    {"name": one.name, "module": type(module).__name__, "first": one.first, "now": _digest(value), "drawn": sites.as_json(one.drawn)}
                    for one, module, value in living
                ],
            )  # fmt: skip
    _wraps.clear()


def arm() -> None:
    from torch.nn.parallel import DistributedDataParallel as DDP

    after(DDP, "__init__", _after_init)
    steps.at_step.append(_at_step, LOOKED_AT + 8)
