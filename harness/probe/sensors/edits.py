"""Which statements change a model after it was wrapped: those that put a module or a parameter into a module, and those that call requires_grad_.

Writes no event itself; ddp.py names the statement where it tells what has changed.
"""

from __future__ import annotations

from typing import Any

from .. import sites, trainflags
from ..patching import before, quiet, wrap
from ..state import S
from . import withheld

of_attributes: dict[tuple[int, str], sites.Site] = {}  # (id of owner module, attribute) -> statement that set a module or parameter
of_flags: list[sites.Site] = []  # statements that called requires_grad_ on a module or a parameter, the last ones
num_edits = [0]  # of both so far, and of what else tells that a model is not as it was: ddp.py looks at the next forward
_watching = [False]


def watch() -> None:
    """From the first wrap on."""
    if _watching[0] or S.compiling:
        return
    _watching[0] = trainflags.is_told[0] = True
    import torch

    kinds = (torch.nn.Module, torch.nn.Parameter)
    dull = frozenset({bool, int, float, str, type(None), tuple, list, dict, torch.Tensor})

    def note(self: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, kinds):
            of_attributes[(id(self), name)] = sites.here(4)
            num_edits[0] += 1
            trainflags.num_placed[0] += 1
        elif name == "require_backward_grad_sync":
            withheld.note_flag(next((w for w in S.ddps if w.ref() is self), None))

    def setting(original: Any) -> Any:
        look = quiet(note)

        def __setattr__(self: Any, name: str, value: Any) -> None:
            if type(value) not in dull or name == "require_backward_grad_sync":  # each forward of DDP sets some flag
                look(self, name, value)
            elif name == "training":
                trainflags.num_switches[0] += 1
            original(self, name, value)

        return __setattr__

    wrap(torch.nn.Module, "__setattr__", setting)
    for method in ("add_module", "register_parameter", "register_module"):
        before(torch.nn.Module, method, note)


def _note_flag(self: Any, *args: Any, **kwargs: Any) -> None:
    """Not of an input of a gradient penalty, nor of the gradients that `zero_grad(set_to_none=False)` cuts off."""
    if S.ddps and type(self).__name__ != "Tensor":
        of_flags.append(sites.here(4))
        num_edits[0] += 1
        del of_flags[:-64]


def arm() -> None:
    import torch

    before(torch.nn.Module, "requires_grad_", _note_flag)
    before(torch.Tensor, "requires_grad_", _note_flag)
