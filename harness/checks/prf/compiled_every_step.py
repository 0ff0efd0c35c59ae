"""PRF114 compiled-in-every-step: a compiled forward reads a Python number that changes, and is compiled anew for each value

What it does
    Reads dynamo's reasons for compiling a frame again. A warning at the line that reads the number, where one and the same expression was the reason
    in six and more steps, with another value each time, in at least every second step from the first to the last of them.

Why it is bad
    torch.compile takes an int of a module for a constant of the program. Each new value is a new program: tenths of a second to minutes, instead of
    the milliseconds of the step. After eight (`recompile_limit`) torch gives up, and the function runs without compilation from there on.

Wrong
    def forward(self, x):                    # under torch.compile
        self.num_calls += 1
        return self.loss(x) * (self.num_calls / 1000)

Right
    self.register_buffer("num_calls", torch.zeros(()), persistent=False)    # a tensor's value is no part of the program

Known limits
    Shapes are left out: torch makes them dynamic by itself. A number that changes once an epoch, or a few stages of a schedule, is no finding. Needs a torch
    whose dynamo keeps its reasons (2.6 and later).
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Event, Run, number

MIN_NUM = 6


class CompiledEveryStep(Check):
    code = "PRF114"
    name = "compiled-in-every-step"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(run.events("compile")):
            raise NotApplicable("nothing is compiled")
        latest = {(rank, e.where, e["expression"]): (rank, e) for rank, e in run.events("recompiled") if e.where is not None}
        found = [(rank, e) for rank, e in latest.values() if _step_by_step(e) and _goes_on(run, e)]
        if not found:
            return
        _, worst = max(found, key=lambda one: number(one[1]["num"]))
        yield self.finding(
            f"compiled anew in {number(worst['num'])} steps: `{worst['expression']}` is a Python number, another one each time, and a constant to torch.compile",
            where=worst.where,
            ranks=sorted({rank for rank, e in found if e.where == worst.where}),
            notes=[f"steps {number(worst['first'])} to {number(worst['last'])}; {worst['seconds']} s of compilation on one rank"],
            help="keep the number in a tensor (a buffer), or count outside of the compiled function and pass a tensor in",
        )


def _goes_on(run: Run, event: Event) -> bool:
    """Not a few values that come back, each compiled once early on. Where torch has given up compiling, there were too many."""
    return number(event["last"]) >= 0.5 * run.num_steps or number(event["num"]) >= number(event["limit"], 8) - 1


def _step_by_step(event: Event) -> bool:
    num = number(event["num"])
    return num >= MIN_NUM and number(event["last"]) - number(event["first"]) + 1 <= 2 * num
