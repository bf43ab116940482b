"""`Baseline` files: the format, fingerprints, and known, new and stale synchronizations."""

from __future__ import annotations

import linecache
import shutil
from pathlib import Path

import pytest

from instrument.base.findings import NOT_COVERED, Site
from instrument.base.source_paths import portable
from instrument.syncs.baseline import Baseline, BaselineEntry

from .reports import CODE, finding, report, script


def fingerprint(path: Path, line: int = 3, **more: object) -> str:
    linecache.checkcache()
    return finding("item", line, path, **more).fingerprint


def test_fingerprint_depends_on_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fingerprint is independent of line numbers, the current folder, the checkout and the Python version."""
    path = script(tmp_path / "one" / "repository", "src/train.py")
    first = fingerprint(path)
    monkeypatch.chdir(path.parent)
    assert first == fingerprint(path)
    moved = tmp_path / "two" / "elsewhere"
    shutil.copytree(tmp_path / "one" / "repository", moved)
    assert first == fingerprint(moved / "src" / "train.py")
    path.write_text("# a line above\n\n" + CODE.replace("    total", "        total"))
    assert first == fingerprint(path, 5)
    assert first == fingerprint(path, site=Site(str(path), 5, "Trainer.<locals>.step"))
    assert first == fingerprint(path, 5, steps=(1, 2, 3), region=("a",), blocked_ns=5, thread="other")


def test_fingerprints_differ(tmp_path: Path) -> None:
    """Different files, functions, operations or code have different fingerprints."""
    path = script(tmp_path, "src/train.py")
    others = [
        fingerprint(path),
        fingerprint(script(tmp_path, "src/other.py")),
        fingerprint(script(tmp_path, "train.py")),
        fingerprint(path, 4),
        fingerprint(path, site=Site(str(path), 3, "other")),
        finding("bool", 3, path).fingerprint,
        finding("item", site=None, thread="a").fingerprint,
        finding("item", site=None, thread="b").fingerprint,
        finding("item", site=None, backward="MulBackward0").fingerprint,
    ]
    assert len(others) == len(set(others))


def test_portable_paths(tmp_path: Path) -> None:
    """Paths are relative to the repository or to site-packages; any other path keeps only its file name."""
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "a" / "pyproject.toml").touch()
    assert "b/c/x.py" == portable(str(tmp_path / "a" / "b" / "c" / "x.py"))
    (tmp_path / "git" / "part").mkdir(parents=True)
    (tmp_path / "git" / ".git").write_text("gitdir: ../elsewhere")  # as in a worktree
    (tmp_path / "git" / "part" / "pyproject.toml").touch()
    assert "part/x.py" == portable(str(tmp_path / "git" / "part" / "x.py"))
    packages = tmp_path / "git" / ".venv" / "lib" / "python3.11" / "site-packages"
    assert "torch/optim/adam.py" == portable(str(packages / "torch" / "optim" / "adam.py"))
    assert "<stdin>" == portable("<stdin>")
    assert "x.py" == portable("/nowhere/at/all/x.py")


def test_round_trip(tmp_path: Path) -> None:
    """A written file reads back equal, with each call site as a comment."""
    path = script(tmp_path)
    found = report(finding("item", 3, path, (0, 0)), finding("bool", 4, path, (1,)), steps=2)
    baseline = Baseline.of([found])
    baseline.write(tmp_path / "known")
    assert baseline == Baseline.read(tmp_path / "known")
    text = (tmp_path / "known").read_text()
    assert text.startswith("# ")
    assert f"{found.findings[0].fingerprint} 2  # train.py in step, item: total = loss.item()\n" in text
    assert [] == baseline.stale([found])


def test_reasons_are_kept(tmp_path: Path) -> None:
    """Rewriting keeps reasons, drops stale entries and adds new ones."""
    path = script(tmp_path)
    first, second = finding("item", 3, path), finding("bool", 4, path)
    before = Baseline(
        {
            first.fingerprint: BaselineEntry(first.fingerprint, 1, "see bug #12"),
            "0" * 16: BaselineEntry("0" * 16, 1, "gone"),
        }
    )
    Baseline.of([report(first, second)], before).write(tmp_path / "known")
    entries = Baseline.read(tmp_path / "known").entries
    assert {first.fingerprint: "see bug #12", second.fingerprint: ""} == {
        name: entry.reason for name, entry in entries.items()
    }


def test_allowed_findings_are_not_written(tmp_path: Path) -> None:
    """Allowed and not covered findings are left out; of several runs, the greatest number is written."""
    path = script(tmp_path)
    item = finding("item", 3, path)
    one = report(item, finding("bool", 4, path, allowed="why"), finding(NOT_COVERED, 5, path))
    two = report(finding("item", 3, path, (0, 0, 1)), steps=2)
    for several in ([one, two], [two, one]):
        assert {item.fingerprint: 2} == {
            name: entry.max_in_step for name, entry in Baseline.of(several).entries.items()
        }


def test_new_synchronizations_are_not_allowed(tmp_path: Path) -> None:
    """Known synchronizations are allowed; new ones, and those above their maximum, are not."""
    path = script(tmp_path)
    baseline = Baseline.of([report(finding("item", 3, path, (0, 1)), steps=2)])
    same = report(finding("item", 3, path, (0,)))
    assert [] == baseline.allow(same, "the baseline")
    assert ["known, in the baseline"] == [found.allowed for found in same.findings]
    same.assert_max(0)
    more = report(finding("item", 3, path, (0, 0, 1)), steps=2)
    ((where, now, most),) = baseline.allow(more, "the baseline")
    assert ("train.py in step, item: total = loss.item()", 2, 1) == (where, now, most)
    assert 2 == more.max_in_step(*more.syncs)
    new = report(finding("item", 3, path), finding("bool", 4, path))
    baseline.allow(new, "the baseline")
    assert ["bool"] == [found.op for found in new.syncs]
    assert ["bool", "item"] == [found.op for found in new.findings]


def test_equal_lines_share_a_fingerprint(tmp_path: Path) -> None:
    """Equal lines of one function share a fingerprint and are counted together."""
    path = script(tmp_path, code="def step(a):\n    a.item()\n    a.item()\n    a.item()\n")
    baseline = Baseline.of([report(finding("item", 2, path), finding("item", 3, path))])
    assert [2] == [entry.max_in_step for entry in baseline.entries.values()]
    moved = report(finding("item", 3, path), finding("item", 4, path))
    baseline.allow(moved, "x")
    assert [] == moved.syncs
    third = report(*(finding("item", line, path) for line in (2, 3, 4)))
    assert 1 == len(baseline.allow(third, "x"))
    assert 3 == len(third.syncs)


def test_any_number(tmp_path: Path) -> None:
    """A star allows any number; forbidden synchronizations are never allowed."""
    path = script(tmp_path)
    item = finding("item", 3, path, (0,) * 50)
    baseline = Baseline({item.fingerprint: BaselineEntry(item.fingerprint, None, "why")})
    often = report(item)
    baseline.allow(often, "x")
    assert ["why"] == [found.allowed for found in often.findings]
    forbidden = report(finding("item", 3, path, forbidden=True))
    baseline.allow(forbidden, "x")
    assert 1 == len(forbidden.syncs)


def test_stale_entries(tmp_path: Path) -> None:
    """Entries that no run finds are stale, unless the code itself allows the synchronization."""
    path = script(tmp_path)
    baseline = Baseline.of([report(finding("item", 3, path), finding("bool", 4, path))])
    gone = baseline.stale([report(finding("item", 3, path, allowed="a comment")), report()])
    assert ["train.py in step, bool: rows = batch[batch > 0]"] == [entry.where for entry in gone]
    assert "bool" in str(gone[0])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("what is this", "line 3: no fingerprint, number and reason: 'what is this'"),
        ("0123456789abcdef", "line 3: no fingerprint"),
        ("0123456789abcdef -1 why", "line 3: no fingerprint"),
        ("0123456789abcde 1 why", "line 3: no fingerprint"),
        ("0123456789abcdef 1", "line 3: it must have a reason"),
        ("0123456789abcdef 1   # why", "line 3: it must have a reason"),
        ("aaaaaaaaaaaaaaaa 1 why", "line 3: aaaaaaaaaaaaaaaa is listed twice"),
    ],
)
def test_malformed_lines(tmp_path: Path, line: str, message: str) -> None:
    """The error names the file, the line and the problem."""
    path = tmp_path / "known"
    path.write_text(f"# a comment\naaaaaaaaaaaaaaaa * why # where\n{line}\n")
    with pytest.raises(ValueError, match=f"cannot read {path}, {message}"):
        Baseline.read(path, reasons=True)


def test_binary_file(tmp_path: Path) -> None:
    """A file that is not text is refused with a one-sentence error."""
    path = tmp_path / "known"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="it is not a text file"):
        Baseline.read(path)
    with pytest.raises(FileNotFoundError):
        Baseline.read(tmp_path / "missing")


def test_edited_by_hand(tmp_path: Path) -> None:
    """Blank lines, comments, spaces and Windows line ends are accepted."""
    path = tmp_path / "known"
    path.write_bytes(b"\r\n  # note\r\n  0123456789abcdef\t3   see bug #12 # then\r\nfedcba9876543210 *\r\n")
    assert [
        BaselineEntry("0123456789abcdef", 3, "see bug #12", "then"),
        BaselineEntry("fedcba9876543210", None),
    ] == list(Baseline.read(path).entries.values())


def test_byte_order_mark(tmp_path: Path) -> None:
    """A byte order mark is not read as part of the first line."""
    path = tmp_path / "known"
    path.write_bytes(b"\xef\xbb\xbf0123456789abcdef 1 why\r\n")
    assert ["why"] == [entry.reason for entry in Baseline.read(path, reasons=True).entries.values()]


@pytest.mark.parametrize("mark", ["\u2028", "\x0b", "\x0c", "\x85", "\x1c"])
def test_reason_with_unusual_separators(tmp_path: Path, mark: str) -> None:
    """Only a newline ends a line; other line separators stay in the reason."""
    path = tmp_path / "known"
    path.write_text(f"0123456789abcdef 1 one{mark}two\n", encoding="utf-8")
    baseline = Baseline.read(path)
    baseline.write(path)
    assert [f"one{mark}two"] == [entry.reason for entry in Baseline.read(path).entries.values()]


@pytest.mark.parametrize("line", [f"{'a' * 16} {'9' * 5000} why", f"{'a' * 16}\t1\t# where"])
def test_huge_number_and_missing_reason(tmp_path: Path, line: str) -> None:
    """A number that is too large is refused with its line number; a call site does not count as a reason."""
    path = tmp_path / "known"
    path.write_text(f"{line}\n")
    with pytest.raises(ValueError, match=f"cannot read {path}, line 1: "):
        Baseline.read(path, reasons=True)


def test_interrupted_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old file is replaced only when the new one is complete."""
    path = tmp_path / "known"
    Baseline({"a" * 16: BaselineEntry("a" * 16, 1, "why")}).write(path)
    before = path.read_text()
    write_text = Path.write_text

    def interrupted(file: Path, text: str, **how: str) -> int:
        write_text(file, text[: len(text) // 2], **how)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Baseline({"b" * 16: BaselineEntry("b" * 16, 2, "another")}).write(path)
    assert before == path.read_text()


def test_empty_comment_is_not_a_reason(tmp_path: Path) -> None:
    """A line that ends with "#" has no reason."""
    path = tmp_path / "known"
    path.write_text("0123456789abcdef 1 #\n")
    with pytest.raises(ValueError, match="line 1: it must have a reason"):
        Baseline.read(path, reasons=True)
