"""PRF106 bias-before-batchnorm: a layer's bias is removed by the normalisation that follows it.

What it does
    Looks at the order of the parameters of wrapped models: a convolution with a bias, directly followed by a batch normalisation of the
    same width. Advice.

Why it is bad
    BatchNorm subtracts the mean, so the bias cannot change the output: it takes memory, an optimizer state and a part of every
    all-reduce, and its gradient is rounding noise.

Wrong
    nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64)

Right
    nn.Conv2d(3, 64, 3, bias=False), nn.BatchNorm2d(64)

Known limits
    Read from names and shapes in the order of definition; the order of calls may differ, which is why it is advice.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Event, Run


class BiasBeforeBatchnorm(Check):
    code = "PRF106"
    name = "bias-before-batchnorm"
    severity = Severity.ADVICE
    substantial = False

    def end(self, run: Run) -> Iterable[Finding]:
        wraps = list(run.events("wrap"))
        if not wraps or not any(e["batchnorms"] for _, e in wraps):
            raise NotApplicable("no wrapped model has a batch normalisation")
        recording = run.ranks[wraps[0][0]]
        shapes = {str(n): s for e in (recording.of("wrapping") if recording is not None else []) for n, s in _shapes(e)}
        for _, event in wraps[:1]:
            useless = _useless(event, shapes)
            if useless:
                many = len(useless) > 1
                yield self.finding(
                    f"{len(useless)} bias{'es' if many else ''} before a batch normalisation that removes {'them' if many else 'it'}",
                    where=event.where,
                    notes=[", ".join(useless[:6])],
                    help="build these layers with bias=False",
                )


def _shapes(event: Event) -> list[tuple[str, list[int]]]:
    names, shapes = event["names"], event["shapes"]
    if not isinstance(names, list) or not isinstance(shapes, list):
        return []
    return [(str(n), s) for n, s in zip(names, shapes, strict=False) if isinstance(s, list)]


def _useless(event: Event, shapes: dict[str, list[int]]) -> list[str]:
    """Biases of convolutions directly before a normalisation's weight, of the same width, whose running_mean is a buffer."""
    names = [str(n) for n in event["names"]] if isinstance(event["names"], list) else []
    buffers = {str(n) for n in event["buffers"]} if isinstance(event["buffers"], list) else set()
    found = []
    for weight, bias, norm in zip(names, names[1:], names[2:], strict=False):
        is_conv = weight.endswith("weight") and len(shapes.get(weight, [])) in (3, 4, 5) and bias == weight.removesuffix("weight") + "bias"
        owner = norm.removesuffix("weight")
        is_norm = norm.endswith("weight") and len(shapes.get(norm, [])) == 1 and f"{owner}running_mean" in buffers
        if is_conv and is_norm and shapes.get(bias) == shapes.get(norm):
            found.append(bias)
    return found
