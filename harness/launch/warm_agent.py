"""torchrun's agent as a script of its own, run by the preloaded agent server: `torchrun` without its import of torch.

It leaves by os._exit: taking a forked interpreter with torch apart costs 2 s of CPU, and the agent has nothing left to say then.
"""

import os
import sys
import traceback

from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.run import main


def caller_name(depth: int = 2) -> str:
    """What the rendezvous writes into its log at every move. torch asks `inspect.stack`, which searches all modules for each frame:
    0.25 s of CPU a launch, half of it before the first rank is started."""
    return sys._getframe(depth).f_code.co_name


dynamic_rendezvous.get_method_name = caller_name


def agent() -> int:
    try:
        main()
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = agent()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
