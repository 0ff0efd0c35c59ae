"""CKP115 blank-statistics: a checkpoint brings the weights of normalisation layers, but not their running statistics.

What it does
    Looks at loads under `strict=False` that leave out `running_mean` of a layer whose weight they give, and at the buffers when the module is
    then called in eval mode: a finding where they are still as they were made.

Why it is bad
    In eval mode batch norm divides by the running statistics. A mean of 0 and a variance of 1 make every layer behind it see other inputs
    than in training: the measured accuracy is that of another model.

Wrong
    torch.save({name: p.detach() for name, p in model.named_parameters()}, path)     # parameters only: no buffers
    net.load_state_dict(torch.load(path), strict=False)
    net.eval()

Right
    torch.save(model.state_dict(), path)                                            # parameters and buffers
    net.load_state_dict(torch.load(path))

Known limits
    Silent where the statistics were there before (averaged weights that are put into the trained model), where the script copies them itself
    or trains on before it measures, and for the new layers of a head, whose weights the file lacks too. Models that `torch.compile` compiled
    are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.ckp import files, keys
from harness.model import Finding, Severity
from harness.probe.protocol import clean_name
from harness.record import Event, Run, number


class BlankStatistics(Check):
    code = "CKP115"
    name = "blank-statistics"
    severity = Severity.ERROR
    explains = ("EVL122",)

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(True for _ in run.events("load_state")):
            raise NotApplicable("no model's state is loaded")
        found = [(rank, e) for rank, e in run.events("blank_stats") if isinstance(e["names"], list) and e["names"]]
        if not found:
            return
        event = found[0][1]
        saved = _saved(run, event)
        at = f" at line {event.where.line}" if event.where is not None else ""
        yield self.finding(
            f"the running statistics of {number(event['num'])} normalisation layers are not in the checkpoint: the model is evaluated with mean 0",
            where=saved.where if saved is not None else event.where,
            ranks=sorted({rank for rank, _ in found}),
            notes=[
                f"loaded{at} into {event['module']} without {keys.shown([str(n) for n in event['names']])}; strict=False hides it",
                *([f"{files.name(str(event['source']))} was saved here, by parameters only"] if saved is not None else []),
            ],
            help="save `model.state_dict()`, which holds buffers too, not `named_parameters()`; and load with strict=True",
        )


def _saved(run: Run, event: Event) -> Event | None:
    """The save of this run that wrote the file, where it has none of these names."""
    lost = {clean_name(str(n)) for n in event["names"]}
    for save in files.saves(run):
        names = [str(n).rsplit("/", 1)[-1] for n in save.begin["tensors"] or ()]
        if save.path == event["source"] and names and not lost & {clean_name(n) for n in names}:
            return save.begin
    return None
