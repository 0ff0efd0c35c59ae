"""What a check is. A check reads a `Run` and says what is wrong with it; it opens no file and starts no process.

A check file defines one subclass of `Check`. It is found by `registry`; there is no list to edit. Its module docstring is its page
(`harness explain CODE`): sections "What it does", "Why it is bad", "Wrong", "Right", "Known limits".

    begin(run)   -> raise NotApplicable(reason) if the run can never tell; called once, before the first step
    step(step)   -> aligned rows of all ranks of one optimizer step; called in order, live and again in the final replay
    end(run)     -> findings; may raise NotApplicable or Inconclusive instead

A check instance sees one run once; keep state on self. While the run goes on, all are asked about what there is so far (`Run.live`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from harness.model import Finding, Severity, Where
from harness.record import Run
from harness.steps import Step


class NotApplicable(Exception):
    """The run has nothing that this check could judge; the reason is shown to the user."""


class Inconclusive(Exception):
    """The run has it, but not enough of it, or too noisy; the reason is shown to the user."""


class Check(ABC):
    """One cause. `explains` names the codes that are mere consequences where this one fires (they are folded under it)."""

    code: ClassVar[str]
    name: ClassVar[str]
    severity: ClassVar[Severity]
    explains: ClassVar[tuple[str, ...]] = ()
    # True: counts as "something was checked" for exit code 5. Launch and exit checks say False.
    substantial: ClassVar[bool] = True
    # True: a shape of the outcome ("the loss does not fall"); any error that is no symptom explains it.
    symptom: ClassVar[bool] = False
    # True: concludes from what has not come so far (a synchronisation): --fail-fast does not end a run on it, for it may come yet.
    provisional: ClassVar[bool] = False
    # True: asked when all others have been: it tells how they fared.
    last: ClassVar[bool] = False

    def begin(self, run: Run) -> None:  # noqa: B027  (optional for a subclass)
        """Raise NotApplicable where the run can never tell."""

    def step(self, step: Step) -> None:  # noqa: B027
        """See one aligned step; cheap, called for every kept step."""

    @abstractmethod
    def end(self, run: Run) -> Iterable[Finding]:
        """The findings, at most one a cause."""

    def finding(
        self,
        message: str,
        *,
        where: Where | None = None,
        ranks: Sequence[int] = (),
        notes: Sequence[str] = (),
        help: str = "",
        severity: Severity | None = None,
        evidence: Mapping[str, Any] | None = None,
        folds: Sequence[str] = (),
    ) -> Finding:
        """A finding of this check; severity defaults to the class's. `folds`: codes that this one explains beside those of its check."""
        return Finding(
            self.code, self.name, severity or self.severity, message, where, tuple(ranks), tuple(notes), help, evidence or {}, tuple(folds)
        )
