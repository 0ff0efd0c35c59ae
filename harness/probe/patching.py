"""Replaces a function by one that also observes. What the probe adds never raises into the script and never changes a result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

from . import interrupts, protocol
from .state import S

F = TypeVar("F", bound=Callable[..., Any])


def quiet(function: F, loses_step: bool = False) -> F:
    """A probe function whose exceptions are counted, not raised, and which is not entered while the probe itself works. `loses_step`: one that fails
    leaves no row of the step."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        at_work = S.at_work
        if S.recorder.disabled or at_work.yes:
            return None
        at_work.yes = True
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if interrupts.of_the_script(error):
                raise
            _count(function, error)
            if loses_step:
                S.recorder.lost_steps += 1
            return None
        finally:
            at_work.yes = False

    return guarded  # type: ignore[return-value]


def _count(function: Any, error: Exception) -> None:
    S.recorder.errors += 1
    if S.recorder.errors <= 5:  # the same one may come at every step
        S.recorder.event(protocol.PROBE_ERROR, where=getattr(function, "__qualname__", "?"), error=repr(error)[:300])


def contained(function: F) -> F:
    """As `quiet`, for a look inside of one that is at work already: what it raises must not take the rest of the other with it."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if interrupts.of_the_script(error):
                raise
            _count(function, error)
            return None

    return guarded  # type: ignore[return-value]


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Set `owner.name` to make(original). False where there is no such name (another torch version).

    Wrappers stack: two sensors may look at one function.
    dynamo is told not to trace into the wrapper: it breaks the graph there, as it does at the functions that we wrap.
    """
    original = owner.__dict__.get(name, getattr(owner, name, None)) if isinstance(owner, type) else getattr(owner, name, None)
    if original is None:
        return False
    static = isinstance(original, staticmethod)
    inner = original.__func__ if static else original
    wrapper = make(inner)
    functools.update_wrapper(wrapper, inner)
    wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]
    setattr(owner, name, staticmethod(wrapper) if static else wrapper)
    return True


PASSED_OVER = "<_harness_probe importlib._bootstrap>"


@functools.cache
def _passed_over(code: CodeType) -> CodeType:
    """`warnings.warn(..., stacklevel=2)` in a function means its caller, whose module the script's filters go by. It counts no frame whose file has the
    words of the import machinery in its name: with those in ours it comes to the line that called the wrapper, as it would without us."""
    return code.replace(co_filename=code.co_filename + PASSED_OVER)


def before(owner: Any, name: str, observe: Callable[..., Any]) -> bool:
    """Call `observe(*args, **kwargs)` before the original."""
    watch = quiet(observe)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            watch(*args, **kwargs)
            return original(*args, **kwargs)

        wrapper.__code__ = _passed_over(wrapper.__code__)
        return wrapper

    return wrap(owner, name, make)


def after(owner: Any, name: str, observe: Callable[..., Any]) -> bool:
    """Call `observe(result, *args, **kwargs)` after the original has returned; not after it raised."""
    watch = quiet(observe)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            watch(result, *args, **kwargs)
            return result

        wrapper.__code__ = _passed_over(wrapper.__code__)
        return wrapper

    return wrap(owner, name, make)
