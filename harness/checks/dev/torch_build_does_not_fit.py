"""DEV106 torch-build-does-not-fit: this torch cannot use this machine's GPU as it should.

What it does
    Looks once at each rank's environment: a CPU build of torch beside a GPU driver, a GPU whose compute capability the build has no code
    for, cuDNN switched off. A warning where the run was to use a GPU, else advice.

Why it is bad
    A CPU build falls back to the CPU without a word, 10 to 100 times slower. An unknown architecture fails late ("no kernel image is
    available").

Wrong
    pip install torch --index-url https://download.pytorch.org/whl/cpu     # on a GPU machine

Right
    install the build that names the driver's CUDA version

Known limits
    Knows NVIDIA drivers only. Code for an older architecture of the same major number runs and is not reported.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Event, Run


class TorchBuildDoesNotFit(Check):
    code = "DEV106"
    name = "torch-build-does-not-fit"
    severity = Severity.WARNING
    substantial = False

    def end(self, run: Run) -> Iterable[Finding]:
        events = [(rank, e) for rank, e in run.events("devices") if e["when"] == "step"]
        if not events:
            raise NotApplicable("no rank told about its devices")
        if not any(e["driver"] or e["uuid"] for _, e in events):
            raise NotApplicable("no GPU driver on this machine")
        for rank, event in events:
            problem, help = self._problem(event)
            if problem:
                strong = run.plan.device == "cuda" or (run.plan.device == "auto" and bool(event["uuid"]))
                yield self.finding(problem, ranks=[rank], severity=None if strong else Severity.ADVICE, help=help)
                return

    def _problem(self, event: Event) -> tuple[str, str]:
        if event["driver"] and not event["build"]:
            return "a CPU build of torch on a machine with a GPU driver", "install a CUDA build of torch; see the selector on pytorch.org"
        capability, arches = str(event["capability"] or ""), event["arch_list"]
        if capability and isinstance(arches, list) and arches and not _has_code(capability, [str(a) for a in arches]):
            return (
                f"the GPU has compute capability {capability}, torch was built for {', '.join(map(str, arches))}",
                "install a build of torch for this GPU",
            )
        if event["uuid"] and event["cudnn"] is False:
            return "cuDNN is switched off", "remove `torch.backends.cudnn.enabled = False`"
        return "", ""


def _has_code(capability: str, arches: list[str]) -> bool:
    """Binary code of the same major and a minor not above, or PTX (compute_XX) not above."""
    major, _, minor = capability.partition(".")
    for arch in arches:
        kind, _, number = arch.partition("_")
        digits = "".join(c for c in number if c.isdigit())
        if len(digits) < 2:
            continue
        known = (int(digits[:-1]), int(digits[-1]))
        mine = (int(major), int(minor or 0))
        if (kind == "sm" and known[0] == mine[0] and known[1] <= mine[1]) or (kind == "compute" and known <= mine):
            return True
    return False
