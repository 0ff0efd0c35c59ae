"""The command line: argv is split at the first `--`; left of it are our options, in any order; right of it are the script's, verbatim.

Every verb is one file in `harness/commands/` with `add_parser(sub)` and `run(args) -> int`. Only the verb that was typed is imported,
so that `harness --help` and `harness list` stay near the cost of starting Python.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from harness.errors import EXIT_INTERNAL, EXIT_SIGINT, EXIT_USAGE, UsageError, did_you_mean, nearest

TYPE_CHECKING = False  # typing.TYPE_CHECKING without typing, which costs as much as argparse
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
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "commands")  # noqa: PTH100, PTH118, PTH120  (pathlib costs 5 ms here)
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


def split(argv: list[str]) -> tuple[list[str], list[str] | None]:
    """(ours, the script's); None where there is no `--` at all."""
    if "--" not in argv:
        return argv, None
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def find_verb(ours: list[str], known: list[str]) -> int | None:
    """Position of the verb: the first word that is one, wherever it stands."""
    return next((i for i, word in enumerate(ours) if word in known), None)


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments of one verb; `script_args` holds what stood after `--`."""
    ours, script_args = split(argv)
    known = verbs()
    at = find_verb(ours, known)
    if at is None:
        return _without_verb(ours, known)
    verb = ours[at]
    _, parsers = top_parser([verb])
    args = _parse_verb(parsers[verb], verb, ours[:at] + ours[at + 1 :])
    args.verb, args.script_args = verb, script_args
    if script_args is not None and verb != "run":
        raise UsageError(f"harness {verb} starts no script, so nothing may stand after --; only harness run passes it on")
    return args


def _parse_verb(parser: Parser, verb: str, words: list[str]) -> argparse.Namespace:
    args, extra = parser.parse_known_intermixed_args(words)
    unknown = [word for word in extra if word.startswith("-") and word != "-"]
    if unknown:
        raise UsageError(_unknown_option(parser, verb, unknown[0]))
    if extra:
        raise UsageError(f"unexpected argument {extra[0]!r} for harness {verb} (harness {verb} --help lists what is valid)")
    return args


def _unknown_option(parser: Parser, verb: str, option: str) -> str:
    name = option.split("=")[0]
    options = [o for action in parser._actions for o in action.option_strings if o.startswith("--")]
    near = nearest(name, options, most=1, cutoff=0.75) if name.startswith("--") else []
    hint = f"; did you mean {near[0]}?" if near else ""
    if verb != "run":
        return f"unknown option {name} of harness {verb}{hint}"
    return f"unknown option {name}{hint or ';'} arguments for the script go after --, as in: harness run SCRIPT -- {option}"


def _without_verb(ours: list[str], known: list[str]) -> argparse.Namespace:
    """Help, the version, or an error that names the nearest verb."""
    word = next((w for w in ours if not w.startswith("-")), None)
    if word is not None and not {"-h", "--help", "--version"} & set(ours):
        hint = did_you_mean(word, [v for v in known if v != "docs"], "the verbs are " + ", ".join(v for v in known if v != "docs"))
        if word.endswith(".py"):
            hint = f"; did you mean harness run {word}?"
        raise UsageError(f"unknown verb {word!r}{hint}")
    parser, _ = top_parser(known)
    _, extra = parser.parse_known_args(ours)  # ends the process for --help and --version
    if extra:
        raise UsageError(f"unknown option {extra[0]}; a verb comes first, as in: harness run ddp_cifar")
    parser.print_help()
    raise SystemExit(EXIT_USAGE)


def run_cli(argv: list[str]) -> int:
    """Everything between argv and the exit code; a traceback is shown for our own errors only."""
    try:
        args = parse(argv)
        command: Any = import_module(f"harness.commands.{args.verb}")
        return int(command.run(args))
    except UsageError as error:
        return _say(str(error), EXIT_USAGE)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else _say(str(end.code), EXIT_USAGE)
    except KeyboardInterrupt:
        return _say("interrupted", EXIT_SIGINT)
    except BrokenPipeError:  # the reader left (`harness list | head`): nobody reads what we would say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        import traceback

        traceback.print_exc()
        return _say("internal error: this is a bug of harness, not of your script", EXIT_INTERNAL)


def _say(message: str, code: int) -> int:
    line = " ".join(message.split())
    sys.stderr.write(f"harness: error: {line}\n" if code != EXIT_SIGINT else f"harness: {line}\n")
    return code
