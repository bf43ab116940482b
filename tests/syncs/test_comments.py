"""Comments that allow a synchronization: on any line of its statement, or alone above it."""

from __future__ import annotations

import linecache
from pathlib import Path

import pytest
import torch

from instrument import dry_run
from instrument.dryrun.run import dry_run_file
from instrument.findings import Site
from instrument.syncs.comments import allowed_at

COMMENT = "# instrument: allow-sync why"


def allowed(path: Path, code: str) -> list[int]:
    """Return the lines of ``code`` where a synchronization is allowed."""
    path.write_text(code, "utf-8")
    linecache.checkcache()
    return [line for line in range(len(code.splitlines()) + 2) if allowed_at(Site(str(path), line, "f"))]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


def test_at_the_line(path: Path) -> None:
    """A comment at the end of a line applies to that line."""
    assert [2] == allowed(path, f"a()\nb()  {COMMENT}\nc()\n")


@pytest.mark.parametrize("line", [1, 2, 3, 4])
def test_any_line_of_a_statement(path: Path, line: int) -> None:
    """A comment may be on any line of a statement."""
    lines = ["before()", "total = add(", "    a.item(),", "    b,", ")", "after()"]
    lines[line] += f"  {COMMENT}"
    assert [2, 3, 4, 5] == allowed(path, "\n".join(lines))


def test_alone_above(path: Path) -> None:
    """A comment alone on a line applies to the whole statement below, and nothing else."""
    assert [1, 2, 3] == allowed(path, f"{COMMENT}\ntotal = add(\n    a)\nafter()\n")
    assert 3 not in allowed(path, f"{COMMENT}\n\na()\n")
    assert [1] == allowed(path, f"a()  {COMMENT}\nb()\n")


def test_above_a_line_inside(path: Path) -> None:
    """A comment inside a statement applies to all of it."""
    assert [1, 2, 3, 4] == allowed(path, f"total = add(\n    {COMMENT}\n    a.item(),\n)\nafter()\n")


def test_bodies(path: Path) -> None:
    """A comment at the head of a compound statement does not apply to its body."""
    code = f"def f():\n    if a:  {COMMENT}\n        b()\n        c()  {COMMENT}\n    else:\n        d()\n"
    assert [2, 4] == allowed(path, code)
    code = f"while any(  {COMMENT}\n    a\n):\n    b()\n"
    assert [1, 2, 3] == allowed(path, code)


def test_one_line_with_a_body(path: Path) -> None:
    """`if a: b()` is one line."""
    assert [1] == allowed(path, f"if a: b()  {COMMENT}\nc()\n")


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
def test_what_is_no_comment(path: Path, code: str) -> None:
    """Text in a string does not count, nor does another comment."""
    assert [] == allowed(path, code)


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
def test_code_that_is_none(path: Path, code: str) -> None:
    """Comments before a syntax error apply, and nothing raises."""
    assert 1 in allowed(path, f"x()  {COMMENT}\n{code}")


def test_no_file() -> None:
    """Without source nothing is allowed."""
    for site in (None, Site("<stdin>", 1, "f"), Site("/gone.py", 3, "f"), Site(__file__, 0, "f")):
        assert allowed_at(site) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")
def test_in_a_dry_run(path: Path) -> None:
    """A comment at the end of a statement applies to all of it; at the head of a loop not to its body."""
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")
def test_decorators() -> None:
    """A comment at a function's head allows nothing in it."""

    def step() -> None:  # instrument: allow-sync not here
        torch.ones(3, device="cuda").sum().item()

    assert 1 == len(dry_run(step).syncs)
