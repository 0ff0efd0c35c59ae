"""A rank or a world size that is the default of a variable which this launcher does not set: every rank takes the same share.

Event "rank_default" (at the end, first 4): site (of the read), variable, default, cut (line that takes a share by it, as a site). The user's files that
name such a variable are read as syntax, once.
"""

from __future__ import annotations

import linecache
import os

from .. import cuts, launchervars, sites, syntax
from ..arm import at_close
from ..patching import quiet
from ..state import S

MAX_TOLD = 4


@quiet
def _tell() -> None:
    unset = {name for name in launchervars.VARIABLES if name not in os.environ}
    told = 0
    for file in cuts.user_files()[: cuts.MAX_FILES]:
        text = "".join(linecache.getlines(file))
        tree = syntax.tree(file) if ("environ" in text or "getenv" in text) and any(name in text for name in unset) else None
        for read in launchervars.defaults_that_cut(tree, unset) if tree is not None else ():
            if told < MAX_TOLD:
                told += 1
                S.recorder.event(
                    "rank_default", (file, read.line, ""), variable=read.variable, default=read.default, cut=sites.as_json((file, read.cut, ""))
                )


def arm() -> None:
    at_close.append(_tell)
