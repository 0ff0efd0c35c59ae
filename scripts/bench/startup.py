"""Start-up of the controller against `python -c pass`, alternating, so that a slow moment of the machine hits both."""

from __future__ import annotations

import sys

from figures import HARNESS, machine, ratio, wall_s


def main(repeats: int = 15) -> None:
    print(machine())
    bare, helped, listed = [], [], []
    for _ in range(repeats):
        bare.append(wall_s([sys.executable, "-c", "pass"], cwd="/tmp"))
        helped.append(wall_s([HARNESS, "--help"], cwd="/tmp"))
        listed.append(wall_s([HARNESS, "list"], cwd="/tmp"))
    print(ratio("`harness --help` / `python -c pass`", helped, bare, 4))
    print(ratio("`harness list` / `python -c pass`", listed, bare, 6))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
