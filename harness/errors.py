"""Errors that the user can mend: one line that names the thing, the place and the fix, and the exit code that goes with it."""

from __future__ import annotations

from collections.abc import Iterable

EXIT_SANE = 0
EXIT_FINDINGS = 1
EXIT_USAGE = 2
EXIT_INTERNAL = 3
EXIT_NOT_LAUNCHED = 4
EXIT_NOTHING_CHECKED = 5
EXIT_SIGINT = 130
EXIT_SIGTERM = 143

# Where several runs, or several reasons, give different codes, the first of these that occurs is the one we exit with.
PRECEDENCE = (EXIT_SIGINT, EXIT_SIGTERM, EXIT_INTERNAL, EXIT_USAGE, EXIT_NOT_LAUNCHED, EXIT_FINDINGS, EXIT_NOTHING_CHECKED, EXIT_SANE)


class UsageError(Exception):
    """Bad input. Raised before any process is started; the message is printed without a traceback."""


def nearest(word: str, valid: Iterable[str], *, most: int = 3, cutoff: float = 0.55) -> list[str]:
    """The valid words that look most like `word`, best first."""
    import difflib  # 3 ms: paid only by who mistypes

    by_lower = {v.lower(): v for v in valid}
    return [by_lower[m] for m in difflib.get_close_matches(word.lower(), by_lower, n=most, cutoff=cutoff)]


def did_you_mean(word: str, valid: Iterable[str], otherwise: str = "") -> str:
    """ "; did you mean a or b?" for the end of a message, or `otherwise` where nothing is near."""
    near = nearest(word, valid)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; {otherwise}" if otherwise else ""


def first_by_precedence(codes: Iterable[int]) -> int:
    """The exit code of a whole session; 5 where there is none at all, because then nothing was checked."""
    seen = set(codes)
    if not seen:
        return EXIT_NOTHING_CHECKED
    return next((code for code in PRECEDENCE if code in seen), EXIT_INTERNAL)
