"""`harness docs`: generates docs/findings/CODE.md and docs/scenarios/NAME.md from the code. For developers; not listed in the help."""

from __future__ import annotations

TYPE_CHECKING = False  # see _options
if TYPE_CHECKING:
    import argparse
    from pathlib import Path
    from typing import Any


def add_parser(sub: Any) -> None:
    parser = sub.add_parser("docs", description="Generates the pages of findings and scenarios from the code.", allow_abbrev=False)
    parser.add_argument("--out", default="docs", metavar="DIR", help="folder that gets findings/ and scenarios/ (default: docs)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is missing, out of date or left over")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    pages = {**finding_pages(), **scenario_pages()}
    out = Path(args.out)
    if args.check:
        stale = outdated(out, pages)
        print("\n".join(f"{path} is out of date; run harness docs --out {out}" for path in stale) or f"{len(pages)} pages are up to date")
        return 1 if stale else 0
    for path in left_over(out, pages):
        path.unlink()
    for name, text in pages.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    print(f"{len(pages)} pages written below {out}")
    return 0


def outdated(out: Path, pages: dict[str, str]) -> list[Path]:
    wrong = [out / name for name, text in pages.items() if not (out / name).is_file() or (out / name).read_text("utf-8") != text]
    return sorted([*wrong, *left_over(out, pages)])


def left_over(out: Path, pages: dict[str, str]) -> list[Path]:
    """Pages of codes and scenarios that are no more."""
    folders = (out / "findings", out / "scenarios")
    return [p for folder in folders if folder.is_dir() for p in folder.glob("*.md") if p.relative_to(out).as_posix() not in pages]


def finding_pages() -> dict[str, str]:
    from harness.commands._pages import all_pages

    pages = all_pages()
    texts = {f"findings/{p.code}.md": _finding_page(p) for p in pages}
    rows = [f"| [{p.code}]({p.code}.md) | {p.name} | {p.severity} | {_cell(p.title)} |" for p in pages]
    texts["findings/README.md"] = "\n".join(["# Findings", "", "| code | name | severity | what |", "|---|---|---|---|", *rows, ""])
    return texts


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _finding_page(page: Any) -> str:
    folds = f"Folds under itself, where it fires: {', '.join(page.explains)}\n\n" if page.explains else ""
    return f"# {page.code} {page.name}\n\n{page.title}\n\nSeverity: {page.severity}\n\n{folds}{to_markdown(page.body)}\n"


PROSE = ("What it does", "Why it is bad", "Known limits")
CODE = ("Wrong", "Right")


def to_markdown(body: str) -> str:
    """Sections become headings; what is indented below "Wrong" and "Right" is code, below the others prose."""
    parts: list[str] = []
    title, lines = "", list[str]()
    for line in [*body.splitlines(), None]:
        if line is not None and line.strip() not in (*PROSE, *CODE):
            lines.append(line)
            continue
        parts.append(_section(title, lines))
        title, lines = (line or "").strip(), []
    return "\n\n".join(part for part in parts if part)


def _section(title: str, lines: list[str]) -> str:
    import textwrap

    text = textwrap.dedent("\n".join(lines)).strip("\n")
    head = f"## {title}\n\n" if title else ""
    if title in CODE:
        return f"{head}```python\n{text}\n```"
    return f"{head}{text}" if title or text else ""


def scenario_pages() -> dict[str, str]:
    import ast
    from pathlib import Path

    from harness import catalog

    texts, rows = {}, []
    faults = catalog.fault_files()
    for scenario in catalog.all_builtin():
        source = Path(scenario.path).read_text("utf-8")
        docstring = ast.get_docstring(ast.parse(source)) or ""
        texts[f"scenarios/{scenario.name}.md"] = _scenario_page(scenario, docstring, faults.get(scenario.name))
        rows.append(f"| [{scenario.name}]({scenario.name}.md) | {_cell(scenario.header.summary)} |")
    texts["scenarios/README.md"] = "\n".join(["# Scenarios", "", "| name | what it proves |", "|---|---|", *rows, ""])
    return texts


def _scenario_page(scenario: Any, docstring: str, faults: Path | None) -> str:
    parts = [f"# {scenario.name}", scenario.header.summary, f"Run it: `harness run {scenario.name}`", _indented_as_code(docstring)]
    if faults is not None:
        import tomllib

        rows = [
            f"| {name} | {f.get('finds', '')} | {_cell(str(f.get('story', '')))} |"
            for name, f in tomllib.loads(faults.read_text("utf-8")).items()
            if isinstance(f, dict)
        ]
        parts.append("\n".join(["## Planted faults", "", "| fault | finding | story |", "|---|---|---|", *rows]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _indented_as_code(docstring: str) -> str:
    """Indented commands keep their layout in Markdown as they are."""
    lines = []
    for before, line in zip(["", *docstring.splitlines()], docstring.splitlines(), strict=False):
        if line.startswith("    ") and before and not before.startswith("    "):
            lines.append("")
        if before.startswith("    ") and line and not line.startswith("    "):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)
