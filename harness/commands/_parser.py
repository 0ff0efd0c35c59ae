"""The parsers: one for the whole command line, one a verb. Only the verbs that are asked for are imported."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from harness.errors import UsageError

TYPE_CHECKING = False  # see _options
if TYPE_CHECKING:
    from typing import Any, NoReturn

DESCRIPTION = (
    "Says whether a distributed PyTorch training script, its launcher and this machine train correctly, fast enough and in bounded memory."
)
EPILOG = """examples:
  harness run ddp_cifar                        a built-in scenario: is this machine sane?
  harness run ./train.py -n 2 -- --lr 0.1      your script, unchanged; what stands after -- is its own
  harness explain DAT101                       what a finding means, and the edit that mends it

exit codes: 0 sane, 1 findings or a failed rank, 2 usage, 3 internal error, 4 could not launch, 5 nothing was checked,
130/143 interrupted"""

# argparse sends every word through gettext, which imports locale for it (a tenth of `harness --help`) and finds no catalogue of ours.
vars(argparse)["_"] = lambda text: text  # not str: a description that is None would be shown as "None"


class Formatter(argparse.HelpFormatter):
    """Asks the terminal for its width itself: argparse imports shutil for it, which costs as much as the rest of the help."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=min(_columns(), 120) - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Text with line ends of its own keeps them."""
        return text if "\n" in text else super()._fill_text(text, width, indent)


def _columns() -> int:
    try:
        return int(os.environ["COLUMNS"])
    except (KeyError, ValueError):
        pass
    try:
        return os.get_terminal_size(sys.__stdout__.fileno()).columns if sys.__stdout__ else 80
    except (OSError, ValueError):
        return 80


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ours: one line, no usage dump."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": Formatter, **options})

    def error(self, message: str) -> NoReturn:
        verb = self.prog.split()[-1]
        raise UsageError(f"{message} (harness {verb} --help lists what is valid)" if " " in self.prog else message)


def verbs() -> list[str]:
    """Names of the verbs: the files of `harness/commands`, without those that begin with an underscore."""
    folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  (pathlib costs 5 ms here)
    return sorted(name[:-3] for name in os.listdir(folder) if name.endswith(".py") and not name.startswith("_"))  # noqa: PTH208


def top_parser(names: list[str]) -> tuple[Parser, dict[str, Parser]]:
    """The parser that knows the verbs in `names`, and the parser of each."""
    from harness import __version__

    parser = Parser(prog="harness", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"harness {__version__}")
    sub = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", parser_class=Parser)
    for name in names:
        import_module(f"harness.commands.{name}").add_parser(sub)
    return parser, dict(sub.choices)
