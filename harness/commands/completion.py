"""`harness completion SHELL`: a completion script, through shtab."""

from __future__ import annotations

from harness.commands._options import add_format

TYPE_CHECKING = False  # see _options
if TYPE_CHECKING:
    import argparse
    from typing import Any


SHELLS = ("bash", "zsh", "tcsh")
# Scenarios are asked for when TAB is pressed, so that a new one needs no new completion script.
PREAMBLE = {
    "bash": '_harness_scripts() { compgen -W "all $(harness list --names 2>/dev/null)" -- "$1"; compgen -f -- "$1"; }\n',
    "zsh": "_harness_scripts() { local -a names;"
    ' names=(all ${(f)"$(harness list --names 2>/dev/null)"}); _describe scenario names; _files -g "*.py"; }\n',
}


def add_parser(sub: Any) -> None:
    parser = sub.add_parser(
        "completion",
        help="a completion script for your shell",
        description='Prints a completion script. For bash: eval "$(harness completion bash)" in ~/.bashrc.',
        allow_abbrev=False,
    )
    parser.add_argument("shell", metavar="SHELL", help=", ".join(SHELLS))
    add_format(parser, ("console",))


def run(args: argparse.Namespace) -> int:
    import shtab

    from harness.commands._output import emit, targets
    from harness.commands._parser import top_parser, verbs
    from harness.errors import UsageError, did_you_mean

    if args.shell not in SHELLS:
        raise UsageError(f"no completion for {args.shell!r}; there is one for {', '.join(SHELLS)}{did_you_mean(args.shell, SHELLS)}")
    parser, parsers = top_parser(verbs())
    _complete(parsers)
    text = shtab.complete(parser, shell=args.shell, root_prefix="harness", preamble=PREAMBLE.get(args.shell, ""))
    emit(targets(args.format, "completion", ("console",)), {"console": lambda: text})
    return 0


def _complete(parsers: dict[str, Any]) -> None:
    """Say what may stand where: scenarios or files, folders, one of a few words."""
    import shtab

    from harness.settings import FORMATS, SETTINGS, OneOf

    words = {setting.flag: setting.parse.choices for setting in SETTINGS if isinstance(setting.parse, OneOf)} | {"--format": FORMATS}
    for parser in parsers.values():
        for action in parser._actions:
            if action.dest in ("scripts", "script"):
                action.complete = {"bash": "_harness_scripts", "zsh": "_harness_scripts"}
            elif action.dest in ("out", "data"):
                action.complete = shtab.DIRECTORY
            for option in action.option_strings:
                if option in words:
                    action.choices = words[option]
