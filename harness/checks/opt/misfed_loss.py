"""OPT141 misfed-loss: a classification loss is fed probabilities where it wants scores, or scores where it wants log-probabilities

What it does
    Reads in the graph of the first losses which operation made the input of cross_entropy, binary_cross_entropy_with_logits, nll_loss and
    ctc_loss.

Why it is bad
    cross_entropy applies log_softmax itself. On the output of a softmax it cannot fall below 0.31 for two classes and 1.46 for ten, and its gradients
    are small from the start: training is slow, and stays above what it could reach. nll_loss takes its input for log-probabilities: on raw scores
    it falls without end, and the accuracy does not follow.

Wrong
    def forward(self, x): return self.head(x).softmax(dim=1)
    loss = F.cross_entropy(model(x), y)

Right
    def forward(self, x): return self.head(x)          # softmax where probabilities are shown
    loss = F.cross_entropy(model(x), y)

Known limits
    Looks at a handful of the first backwards on the statement's own graph; compiled models show no operations. What is scaled or added to between the two
    (a temperature) is taken for meant, and so is nll_loss of scores whose logsumexp is a term of the same loss: cross entropy by hand.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Run

WANTS = {"cross_entropy": "scores", "binary_cross_entropy_with_logits": "scores", "nll_loss": "log-probabilities", "ctc_loss": "log-probabilities"}
MADE_BY = {"SoftmaxBackward0": "the probabilities of a softmax", "SigmoidBackward0": "the probabilities of a sigmoid"}
HELP = {
    "cross_entropy": "leave the softmax out of what the loss gets: cross_entropy applies log_softmax itself",
    "binary_cross_entropy_with_logits": "leave the sigmoid out of what the loss gets, or use binary_cross_entropy",
    "nll_loss": "use cross_entropy, or end the model with log_softmax(dim=1)",
    "ctc_loss": "give it `scores.log_softmax(dim=-1)`",
}


class MisfedLoss(Check):
    code = "OPT141"
    name = "misfed-loss"
    severity = Severity.WARNING
    explains = ("OPT113",)

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(True for _ in run.events("loss")):
            raise NotApplicable("no loss was seen")
        told = [(rank, e) for rank, e in run.events("misfed_loss") if e["loss"] in WANTS]
        if not told:
            return
        first = told[0][1]
        loss, fed = str(first["loss"]), MADE_BY.get(str(first["fed"]), "raw scores")
        yield self.finding(
            f"{loss} is given {fed}, and wants {WANTS[loss]}",
            where=first.where,
            ranks=sorted({rank for rank, e in told if e.where == first.where}),
            notes=[f"its input was made by {str(first['fed']).removesuffix('0').removesuffix('Backward')}"],
            help=HELP[loss],
        )
