"""DEV110 autocast-elsewhere: mixed precision is asked for on a kind of device on which nothing is computed

What it does
    Compares the device type of each `torch.autocast(...)` that the script enters in a step with the devices of the parameters that the step changes.

Why it is bad
    Autocast for "cuda" does nothing to what a CPU computes, and the other way round: everything stays in float32, at the price of float32, and the
    run says nothing of how the script trains in mixed precision. A GradScaler goes on scaling for nothing.

Wrong
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = loss_fn(model(x.to(device)), y.to(device))

Right
    with torch.autocast(device.type, dtype=torch.bfloat16):              # or enabled=device.type == "cuda"

Known limits
    Advice only where float16 on a GPU is asked for and the script runs on a CPU: the recipe is the GPU's, and its float16 and scaler are no use here.
    One that is asked for with `enabled=False` is off on purpose. Parameters on several kinds of devices are healthy where one of them is meant.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks import told
from harness.checks.base import Check
from harness.model import Finding, Severity
from harness.record import Run


class AutocastElsewhere(Check):
    code = "DEV110"
    name = "autocast-elsewhere"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        found = told.of(run, "autocast_elsewhere")
        if not found:
            return
        event = found[0][1]
        asked, on = ", ".join(map(str, event["asked"] or ())), ", ".join(map(str, event["on"] or ()))
        recipe = event["half"] is True and event["on"] == ["cpu"]
        yield self.finding(
            f"autocast is asked for {asked}, and the model is on {on}: mixed precision has no effect",
            where=event.where,
            ranks=sorted({rank for rank, _ in found}),
            severity=Severity.ADVICE if recipe else None,
            notes=["torch says so in a warning at most; all that is computed stays in the precision of the parameters"],
            help="`torch.autocast(device.type, ...)`, or `enabled=` false where this device is not meant",
        )
