"""Comments that allow a synchronization, on any line of its statement or alone above it."""

from __future__ import annotations

import linecache
from pathlib import Path

import pytest
import torch

from instrument import dry_run
from instrument.base.findings import Site
from instrument.explain.waits.comments import allowed_at
from instrument.syncs.dryrun.run import dry_run_file

COMMENT = "# instrument: allow-sync why"


def allowed_lines(path: Path, code: str) -> list[int]:
    """Return the lines of ``code`` where a synchronization is allowed."""
    path.write_text(code, "utf-8")
    linecache.checkcache()
    return [line for line in range(len(code.splitlines()) + 2) if allowed_at(Site(str(path), line, "f"))]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


def test_comment_at_end_of_line(path: Path) -> None:
    """A comment at the end of a line applies to that line."""
    assert [2] == allowed_lines(path, f"a()\nb()  {COMMENT}\nc()\n")


@pytest.mark.parametrize("line", [1, 2, 3, 4])
def test_comment_on_any_line_of_a_statement(path: Path, line: int) -> None:
    """A comment may be on any line of a statement."""
    lines = ["before()", "total = add(", "    a.item(),", "    b,", ")", "after()"]
    lines[line] += f"  {COMMENT}"
    assert [2, 3, 4, 5] == allowed_lines(path, "\n".join(lines))


def test_comment_alone_above(path: Path) -> None:
    """A comment alone on a line applies to the whole statement below it and to nothing else."""
    assert [1, 2, 3] == allowed_lines(path, f"{COMMENT}\ntotal = add(\n    a)\nafter()\n")
    assert 3 not in allowed_lines(path, f"{COMMENT}\n\na()\n")
    assert [1] == allowed_lines(path, f"a()  {COMMENT}\nb()\n")


def test_comment_inside_a_statement(path: Path) -> None:
    """A comment alone on a line within a statement applies to the whole statement."""
    assert [1, 2, 3, 4] == allowed_lines(path, f"total = add(\n    {COMMENT}\n    a.item(),\n)\nafter()\n")


def test_comment_at_a_compound_statement(path: Path) -> None:
    """A comment at the head of a compound statement does not apply to its body."""
    code = f"def f():\n    if a:  {COMMENT}\n        b()\n        c()  {COMMENT}\n    else:\n        d()\n"
    assert [2, 4] == allowed_lines(path, code)
    code = f"while any(  {COMMENT}\n    a\n):\n    b()\n"
    assert [1, 2, 3] == allowed_lines(path, code)


def test_compound_statement_on_one_line(path: Path) -> None:
    """A comment on `if a: b()` applies to that line."""
    assert [1] == allowed_lines(path, f"if a: b()  {COMMENT}\nc()\n")


@pytest.mark.parametrize(
    "code",
    [
        f'log("{COMMENT}")\n',
        f'x = """\n{COMMENT}\n"""\ny()\n',
        "a()  # allow-sync why\n",
        "a()  # instrument: allow-syncing\n",
        "a()  # instrument: nothing\n",
    ],
    ids=["string", "text", "nobody", "longer", "other"],
)
def test_other_text_and_comments(path: Path, code: str) -> None:
    """Text in strings and other comments allow nothing."""
    assert [] == allowed_lines(path, code)


@pytest.mark.parametrize(
    ("comment", "reason"),
    [
        ("# instrument: allow-sync the loss is shown", "the loss is shown"),
        ("#instrument:allow-sync: the loss is shown  ", "the loss is shown"),
        ("# instrument: allow-sync - the loss, é", "the loss, é"),
        ("# noqa # instrument: allow-sync not the first", None),
        ("# instrument: allow-sync", "a comment at the line"),
    ],
)
def test_reasons(path: Path, comment: str, reason: str | None) -> None:
    """The text after the keyword is the reason."""
    path.write_text(f"a()  {comment}\n", "utf-8")
    linecache.checkcache()
    assert reason == allowed_at(Site(str(path), 1, "f"))


@pytest.mark.parametrize("code", ["a(\n", "def f(:\n", "'''\n", "\x00\n", "    a()\n  b()\n"])
def test_syntax_errors(path: Path, code: str) -> None:
    """Comments before a syntax error apply, and no exception is raised."""
    assert 1 in allowed_lines(path, f"x()  {COMMENT}\n{code}")


def test_missing_source() -> None:
    """Without source code nothing is allowed."""
    for site in (None, Site("<stdin>", 1, "f"), Site("/gone.py", 3, "f"), Site(__file__, 0, "f")):
        assert allowed_at(site) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a real GPU is present")
def test_comments_in_a_dry_run(path: Path) -> None:
    """In a dry run, a comment applies to its whole statement, but at the head of a loop not to the body."""
    path.write_text(
        f"""import torch
def step():
    value = torch.ones(3, device="cuda")
    print(
        value
        .sum()
        .item()
    )  {COMMENT}
    for _ in range(2):  {COMMENT}
        value.tolist()
    if value.any():  {COMMENT}
        value.cpu()
""",
        "utf-8",
    )
    report = dry_run_file(path, "step")
    assert {"item": "why", "bool": "why"} == {found.op: found.allowed for found in report.allowed}
    assert ["cpu", "tolist"] == sorted(found.op for found in report.syncs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a real GPU is present")
def test_comment_at_a_function_head() -> None:
    """A comment at the head of a function allows nothing in its body."""

    def step() -> None:  # instrument: allow-sync not here
        torch.ones(3, device="cuda").sum().item()

    assert 1 == len(dry_run(step).syncs)
