"""`harness` and `python -m harness`."""

from __future__ import annotations

import sys

from harness.cli import run_cli


def main() -> int:
    return run_cli(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
