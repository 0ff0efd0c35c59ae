"""What the wrapped models were fed, forward by forward: tells whether a rank trains on what another had some steps before.

Event "fed" (every 64 training forwards of a wrapped model, and at the end; first 512): index (of the wrap event), first (number of the
first forward), digests (zlib+base64 of uint32, one a forward, in order), made (the statement that moves on to the next batch, or makes it).
CPU inputs only: a device batch would be waited for.
"""

from __future__ import annotations

from .. import origins, sites
from ..arm import at_close
from ..datasets import pack
from ..patching import quiet
from ..state import S

MAX_FORWARDS, EVERY = 512, 64
LOCATED_AT = 8  # forwards of the EVERY: the first of all may be a trial; asked each time it would cost 20 us
_fed: dict[int, list[int]] = {}  # index of the wrap -> digests not written yet
_num: dict[int, int] = {}
_made: dict[sites.Site, sites.Site] = {}
_at: dict[int, sites.Site] = {}


def note(index: int, digest: int) -> None:
    """A training forward; about 0.7 us."""
    num = _num.get(index, 0)
    if num >= MAX_FORWARDS or index > 3 or S.steps >= 256:  # from there on steps without digests leave gaps (protocol.witnessed)
        return
    _num[index] = num + 1
    kept = _fed.setdefault(index, [])
    if index not in _at or len(kept) == LOCATED_AT:
        _at[index] = sites.here(5)
    kept.append(digest >> 32 & 0xFFFFFFFF)
    if len(kept) >= EVERY:
        _write(index)


def _write(index: int) -> None:
    kept, site = _fed.pop(index), _at[index]
    if site not in _made:
        _made[site] = origins.advanced_at(site)
    S.recorder.event("fed", site, index=index, first=_num[index] - len(kept), digests=pack(kept), made=sites.as_json(_made[site]))


def _write_all() -> None:
    for index in list(_fed):
        _write(index)


def arm() -> None:
    at_close.append(quiet(_write_all))
