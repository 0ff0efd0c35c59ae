"""Whether the trained models have layers that behave otherwise in evaluation."""

from __future__ import annotations

from harness.record import Run, number


def counts(run: Run) -> tuple[int, int]:
    """(Dropout, BatchNorm layers) of the trained models, of the rank that has most."""
    found = [(number(e["dropout"]), number(e["batchnorm"])) for _, e in run.events("layers")]
    return max(found, default=(0, 0))


def sensitive(run: Run) -> bool:
    return any(counts(run))


def told(run: Run) -> str:
    dropout, batchnorm = counts(run)
    parts = [f"{n} {name} layer{'s' if n > 1 else ''}" for n, name in ((dropout, "Dropout"), (batchnorm, "BatchNorm")) if n]
    return "the model has " + " and ".join(parts)
