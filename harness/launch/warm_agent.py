"""torchrun's agent as a script of its own, run by the preloaded agent server: `torchrun` without its import of torch.

It leaves by os._exit: taking a forked interpreter with torch apart costs 2 s of CPU, and the agent has nothing left to say then.
"""

import os
import sys
import traceback

from torch.distributed.run import main


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
