"""README and docs/: code runs, the diff is real, commands and links exist."""

from __future__ import annotations

import difflib
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console

import instrument
from instrument.read.jobs.read import read_file
from instrument.read.measures.summary import summarize
from instrument.read.tables.trace import Trace
from instrument.show.terminal.summary import print_summary
from instrument.show.terminal.trace_report import print_windows
from instrument.start import cli
from tests.support.loops import Loop
from tests.support.shared_traces import shared

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))


def prose(page: Path) -> str:
    """Return the text of a page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_diff_is_real() -> None:
    """Every line of the README's diff is in the diff of the two examples."""
    plain, annotated = (ROOT / "examples" / name for name in ("transformer.py", "transformer_annotated.py"))
    real = list(difflib.ndiff(plain.read_text().splitlines(), annotated.read_text().splitlines()))
    real = [line[:1] + line[2:] for line in real if not line.startswith("?")]
    (shown,) = blocks("diff")
    assert [line for line in shown.splitlines() if line and line not in real] == []


def test_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks of the README run in order."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {
        "loader": [torch.ones(2)] * 12,
        "instrument": instrument,
        "model": torch.nn.Linear(2, 2),
    }
    for block in blocks("python"):
        exec(block, names)
    assert len(list(tmp_path.rglob("*.pt.trace.json.gz"))) >= 2


OWN_TESTS = {
    "compare.md": "tests/comparison/test_guide.py",
    "contract.md": "tests/contract/test_guide.py",
    "diagnose.md": "tests/diagnosis/test_guide.py",
    "page.md": "tests/diagnosis/test_guide.py",
    "syncs.md": "tests/syncs/test_guide.py",
    "traces.md": "tests/traces/test_guide.py",
    "what-if.md": "tests/diagnosis/test_guide.py",
}
BLOCK = re.compile(r"(?:<!-- not run: ([^>]+) -->\n+)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "README.md"], ids=lambda page: page.name)
def test_code_of_pages_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks of a page run in order, except those with a comment "not run"."""
    if page.name in OWN_TESTS:
        assert f'"{page.name}"' in (ROOT / OWN_TESTS[page.name]).read_text()
        return
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {
        "loader": [torch.ones(2)] * 12,
        "epochs": 1,
        "train_step": lambda batch: None,
        "instrument": instrument,
        "model": torch.nn.Linear(2, 2),
    }
    for reason, language, code in BLOCK.findall(page.read_text()):
        assert language in ("", "python", "console", "yaml", "toml", "diff"), language
        if language == "python" and not reason:
            exec(code, names)
            if "handle" in names:
                names.pop("handle").remove()


def test_commands_exist() -> None:
    """Every `make` target on a page exists."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        name for page in PAGES for name in re.findall(r"(?:`|^)make\s([a-z-]+)", page.read_text(), re.MULTILINE)
    }
    assert len(named) > 5
    assert named <= targets


def options_of(command: typer.core.TyperGroup | Any) -> dict[str, set[str]]:
    """Return the options of each subcommand."""
    subcommands = {name: command.resolve_command(None, [name])[1] for name in cli.SUBCOMMANDS}
    return {
        name: {option for parameter in sub.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, sub in subcommands.items()
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_exist(page: Path) -> None:
    """Every command ``instrument ...`` on a page exists, with its options."""
    options = options_of(typer.main.get_command(cli.app))
    text = page.read_text()
    code = [
        *re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL),
        *re.findall(r"`([^`]+)`", prose(page)),
    ]
    for line in (line for part in code for line in part.splitlines()):
        for name, rest in re.findall(r"(?:^|[$:] )instrument ([a-z]+)\b(.*)", line):
            if name not in options:
                assert not line.startswith(("$ ", "instrument ")) or "(" in line, line
                continue
            shown = re.findall(r"(?:^| )(--[a-z-]+)", rest.partition(" -- ")[0].partition("#")[0])
            assert set(shown) - {"--help"} <= options[name], line


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site build them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_exist() -> None:
    """Every file and heading that the documents link to exists."""
    documents = {*PAGES, ROOT / "CHANGELOG.md", *(ROOT / "integrations").glob("*/*.md")}
    for document in documents:
        for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
            if target.startswith("https://"):
                continue
            file, _, anchor = target.partition("#")
            page = document.parent / file if file else document
            assert page.exists(), (document.name, target)
            assert not anchor or anchor in anchors(page), (document.name, target)


def test_every_page_is_linked() -> None:
    """Each page of docs/ is linked from the README or another page."""
    for page in (ROOT / "docs").glob("*.md"):
        linked = [
            other
            for other in PAGES
            if other != page and re.search(rf"\]\((?:docs/)?{page.name}", other.read_text())
        ]
        assert linked or page.name == "index.md", page.name


def test_public_names_are_documented() -> None:
    """Every public name has a docstring and occurs in the documents."""
    text = README + "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    for name in instrument.__all__:
        assert getattr(instrument, name).__doc__, name
        assert f"instrument.{name}" in text, name


def test_reference_has_every_public_name() -> None:
    """The reference of the site has each public name once."""
    reference = (ROOT / "docs" / "reference.rst").read_text()
    assert sorted(re.findall(r"^\.\. auto\w+:: (\w+)$", reference, re.MULTILINE)) == sorted(instrument.__all__)


def summary_of(trace: Trace, document: str) -> str:
    """Return the summary of a trace, without trailing spaces: in windows.md that of a run, else of the command."""
    out = StringIO()
    console = Console(file=out, width=80)
    if document == "docs/windows.md":
        print_summary(summarize(trace), files=[], folder=Path(), console=console)
    else:
        print_windows([(trace, None)], "auto", console=console)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def documented_summary(document: str) -> list[str]:
    """Return the lines of the GPU trace's summary in a document, without the command and "..."."""
    (block,) = re.findall(
        r"```\n((?:\$[^\n]*\n)?(?:Bound by [^`]*?)?Where the step went: CPU .*?)```", document, re.DOTALL
    )
    return [line for line in block.splitlines() if line != "..." and not line.startswith("$")]


@pytest.mark.parametrize("document", ["docs/traces.md", "docs/windows.md"])
def test_the_summary_of_a_gpu_trace_is_real(document: str) -> None:
    """Every line of the documented summary is printed for its trace."""
    printed = summary_of(read_file(shared("hta_ns_resolution.json.gz")), document).splitlines()
    assert [line for line in documented_summary((ROOT / document).read_text()) if line not in printed] == []


@pytest.mark.parametrize("document", ["docs/traces.md", "docs/windows.md"])
def test_the_words_of_the_summary_of_a_gpu_trace(document: str, tmp_path: Path) -> None:
    """The summary of a similar simulated loop has the words of the documented summary."""
    loop = Loop(queue=300)
    for number in range(101, 106):
        with loop.step(number):
            start = loop.cpu
            for _ in range(280):
                loop.launch(100)
            loop.add("user_annotation", "## backward ##", start, loop.cpu)
    printed = words_of(summary_of(loop.trace(tmp_path), document))
    shown = [
        line for line in documented_summary((ROOT / document).read_text()) if not line.startswith(("  ", "#"))
    ]
    columns = [line for line in shown if line.startswith("region")]
    sentences = re.findall(r"[^.;:]+[.;:]", words_of(" ".join(line for line in shown if line not in columns)))
    assert len(sentences) > 5
    assert [part for part in (*sentences, *map(words_of, columns)) if part.strip() not in printed] == []


def words_of(text: str) -> str:
    """Return the text in one line, without numbers, units and the lines of tables."""
    text = re.sub(r"\b\d[\d.,-]*(?: (?:ns|us|ms|s|steps)\b)?|─+", "", text)
    return " ".join(re.sub(r"[(),]", " ", text).split())


def test_lines_of_the_frameworks() -> None:
    """The table of frameworks names functions and classes of the adapters."""
    table = (ROOT / "docs" / "frameworks.md").read_text()
    rows = [row.split("|")[2] for row in table.splitlines() if "](../integrations/" in row]
    named = [pair for row in rows for pair in re.findall(r"\b([a-z]+)\.(\w+)\(", row)]
    assert len(rows) == 8 <= len(named)
    for module, name in named:
        source = ROOT / "src" / "instrument" / "integrations"
        files = [*source.glob(f"{module}.py"), *source.glob(f"{module}/__init__.py")]
        assert any(re.search(rf"\b{name}\b", file.read_text()) for file in files), (module, name)
