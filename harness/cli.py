"""The command line: argv is split at the first `--`; left of it are our options, in any order; right of it are the script's, verbatim.

Every verb is one file in `harness/commands/` with `add_parser(sub)` and `run(args) -> int`. Only the verb that was typed is imported,
so that `harness --help` and `harness list` stay near the cost of starting Python.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from harness.commands._parser import Parser, top_parser, verbs
from harness.errors import EXIT_INTERNAL, EXIT_SIGINT, EXIT_USAGE, UsageError, did_you_mean, nearest

TYPE_CHECKING = False  # typing.TYPE_CHECKING without typing, which costs as much as argparse
if TYPE_CHECKING:
    from typing import Any


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
    if script_args is not None and verb not in ("run", "sbatch"):
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
    longer = [o for o in options if o.startswith(name)] if len(name) > len("--x") else []  # abbreviations are refused, not misread
    near = longer or (nearest(name, options, most=1, cutoff=0.75) if name.startswith("--") else [])
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
        code = int(command.run(args))
        sys.stdout.flush()  # here, where a reader that has left is no error, and not at the interpreter's end
        return code
    except UsageError as error:
        return _say(str(error), EXIT_USAGE)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else _say(str(end.code), EXIT_USAGE)
    except KeyboardInterrupt:
        return _say("interrupted", EXIT_SIGINT)
    except BrokenPipeError:  # the reader left (`harness list | head`): nobody reads what we would say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except FileNotFoundError as error:
        if error.filename is None and not _stands_somewhere():
            return _say("the folder you stand in was removed; cd into one that exists", EXIT_USAGE)
        return _internal()
    except Exception:
        return _internal()


def _stands_somewhere() -> bool:
    try:
        return bool(os.getcwd())  # noqa: PTH109
    except FileNotFoundError:
        return False


def _internal() -> int:
    """Of the exception being handled."""
    import traceback

    traceback.print_exc()
    return _say("internal error: this is a bug of harness, not of your script", EXIT_INTERNAL)


def _say(message: str, code: int) -> int:
    line = " ".join(message.split())
    sys.stderr.write(f"harness: error: {line}\n" if code != EXIT_SIGINT else f"harness: {line}\n")
    return code
