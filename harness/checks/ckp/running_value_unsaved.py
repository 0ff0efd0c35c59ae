"""CKP122 running-value-not-saved: a module's running value is a plain tensor, so the file that holds the rest of its model lacks it

What it does
    Looks at tensors that a module updates from what they were (a moving average, a running sum) and that its forward computes with, where they
    are plain attributes: neither parameters nor buffers. A finding where such a value has changed since the first step and a file is
    written that holds every parameter of the model and not the value.

Why it is bad
    `state_dict()` holds parameters and buffers, and nothing else. The file loads without a word, and the model computes with the value that
    the constructor made: it normalises by mean 0 and deviation 1, and predicts something else. `.to(device)` leaves such a tensor behind too.

Wrong
    self.mean = torch.zeros(dim)
    ...
    self.mean.lerp_(x.mean(0), 0.1)

Right
    self.register_buffer("mean", torch.zeros(dim))      # in the state dict, moved by .to(), broadcast by DDP

Known limits
    Read from the source: sums, products and `lerp` of the value with itself. Silent where the class writes its own state
    (`get_extra_state`), where code outside of it names the attribute (it may save it in another way), and for buffers with
    `persistent=False`, which say that they are not to be saved. What objects other than modules keep is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.ckp import files, keys
from harness.model import Finding, Severity
from harness.record import Run, where_of


class RunningValueUnsaved(Check):
    code = "CKP122"
    name = "running-value-not-saved"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(True for _ in run.events("save")):
            raise NotApplicable("nothing is saved")
        found = [(rank, e) for rank, e in run.events("running_unsaved") if isinstance(e["names"], list) and e["names"]]
        if not found:
            return
        event = found[0][1]
        names = [str(n) for n in event["names"]]
        attribute = names[0].rpartition(".")[2]
        updated, at = where_of(event["updated"]), f" at line {event.where.line}" if event.where is not None else ""
        yield self.finding(
            f"`{names[0]}`, a running value that {event['module']} computes with, is a plain tensor: {files.name(str(event['path']))} holds the "
            "model without it",
            where=where_of(event["made"]),
            ranks=sorted({rank for rank, _ in found}),
            notes=[
                f"saved{at} with every parameter, and without {keys.shown(names)}",
                *([f"updated at line {updated.line}; a model that loads the file starts from the constructor's value"] if updated is not None else []),
            ],
            help=f"`self.register_buffer({attribute!r}, ...)`: in the state dict, moved by `.to()`",
        )
