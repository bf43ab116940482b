"""Files of known waits: what they say, what stays the same, what is new and what is gone."""

from __future__ import annotations

import linecache
import shutil
from pathlib import Path

import pytest

from instrument.findings import NOT_COVERED, Site
from instrument.source_paths import portable
from instrument.syncs.baseline import Baseline, BaselineEntry

from .reports import CODE, finding, report, script


def fingerprint(path: Path, line: int = 3, **more: object) -> str:
    linecache.checkcache()
    return finding("item", line, path, **more).fingerprint


def test_fingerprint_is_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays the same when lines move, in another folder, from another folder, and under Python 3.10."""
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


def test_fingerprint_tells_apart(tmp_path: Path) -> None:
    """Another file, function, operation or code has another one."""
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


def test_portable(tmp_path: Path) -> None:
    """A path is from the root of its repository, or of the packages; else only the name is left."""
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
    """What is written is read again, and says for people where it was."""
    path = script(tmp_path)
    found = report(finding("item", 3, path, (0, 0)), finding("bool", 4, path, (1,)), steps=2)
    known = Baseline.of([found])
    known.write(tmp_path / "known")
    assert known == Baseline.read(tmp_path / "known")
    text = (tmp_path / "known").read_text()
    assert text.startswith("# ")
    assert f"{found.findings[0].fingerprint} 2  # train.py in step, item: total = loss.item()\n" in text
    assert [] == known.stale([found])


def test_reasons_are_kept(tmp_path: Path) -> None:
    """Writing again keeps why; what is gone goes, what is new comes."""
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


def test_only_what_counts_is_written(tmp_path: Path) -> None:
    """What is allowed, or not covered, is no known wait; of several runs the greatest number counts."""
    path = script(tmp_path)
    item = finding("item", 3, path)
    one = report(item, finding("bool", 4, path, allowed="why"), finding(NOT_COVERED, 5, path))
    two = report(finding("item", 3, path, (0, 0, 1)), steps=2)
    for several in ([one, two], [two, one]):
        assert {item.fingerprint: 2} == {name: entry.most for name, entry in Baseline.of(several).entries.items()}


def test_new(tmp_path: Path) -> None:
    """Known waits are allowed; a new line, or one that waits more often, is not."""
    path = script(tmp_path)
    known = Baseline.of([report(finding("item", 3, path, (0, 1)), steps=2)])
    same = report(finding("item", 3, path, (0,)))
    assert [] == known.allow(same, "the baseline")
    assert ["known, in the baseline"] == [found.allowed for found in same.findings]
    same.assert_max(0)
    more = report(finding("item", 3, path, (0, 0, 1)), steps=2)
    ((where, now, most),) = known.allow(more, "the baseline")
    assert ("train.py in step, item: total = loss.item()", 2, 1) == (where, now, most)
    assert 2 == more.most(*more.syncs)
    new = report(finding("item", 3, path), finding("bool", 4, path))
    known.allow(new, "the baseline")
    assert ["bool"] == [found.op for found in new.syncs]
    assert ["bool", "item"] == [found.op for found in new.findings]


def test_equal_lines(tmp_path: Path) -> None:
    """Two equal lines of one function are told apart by their number only."""
    path = script(tmp_path, code="def step(a):\n    a.item()\n    a.item()\n    a.item()\n")
    known = Baseline.of([report(finding("item", 2, path), finding("item", 3, path))])
    assert [2] == [entry.most for entry in known.entries.values()]
    moved = report(finding("item", 3, path), finding("item", 4, path))
    known.allow(moved, "x")
    assert [] == moved.syncs
    third = report(*(finding("item", line, path) for line in (2, 3, 4)))
    assert 1 == len(known.allow(third, "x"))
    assert 3 == len(third.syncs)


def test_any_number(tmp_path: Path) -> None:
    """A star allows any number; nothing allows what is forbidden."""
    path = script(tmp_path)
    item = finding("item", 3, path, (0,) * 50)
    known = Baseline({item.fingerprint: BaselineEntry(item.fingerprint, None, "why")})
    often = report(item)
    known.allow(often, "x")
    assert ["why"] == [found.allowed for found in often.findings]
    forbidden = report(finding("item", 3, path, forbidden=True))
    known.allow(forbidden, "x")
    assert 1 == len(forbidden.syncs)


def test_stale(tmp_path: Path) -> None:
    """What no run finds any more is told, also where it is allowed in the code by now."""
    path = script(tmp_path)
    known = Baseline.of([report(finding("item", 3, path), finding("bool", 4, path))])
    gone = known.stale([report(finding("item", 3, path, allowed="a comment")), report()])
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
def test_wrong_lines(tmp_path: Path, line: str, message: str) -> None:
    """The error names the file, the line and what is wrong."""
    path = tmp_path / "known"
    path.write_text(f"# a comment\naaaaaaaaaaaaaaaa * why # where\n{line}\n")
    with pytest.raises(ValueError, match=f"cannot read {path}, {message}"):
        Baseline.read(path, reasons=True)


def test_no_text(tmp_path: Path) -> None:
    """A file that is none of ours is refused in a sentence."""
    path = tmp_path / "known"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="it is not a text file"):
        Baseline.read(path)
    with pytest.raises(FileNotFoundError):
        Baseline.read(tmp_path / "missing")


def test_edited_by_hand(tmp_path: Path) -> None:
    """Blank lines, comments, spaces and the line ends of Windows are fine."""
    path = tmp_path / "known"
    path.write_bytes(b"\r\n  # note\r\n  0123456789abcdef\t3   see bug #12 # then\r\nfedcba9876543210 *\r\n")
    assert [
        BaselineEntry("0123456789abcdef", 3, "see bug #12", "then"),
        BaselineEntry("fedcba9876543210", None),
    ] == list(Baseline.read(path).entries.values())


def test_from_windows(tmp_path: Path) -> None:
    """The mark that editors there put in front of a file is no part of its first line."""
    path = tmp_path / "known"
    path.write_bytes(b"\xef\xbb\xbf0123456789abcdef 1 why\r\n")
    assert ["why"] == [entry.reason for entry in Baseline.read(path, reasons=True).entries.values()]


@pytest.mark.parametrize("mark", ["\u2028", "\x0b", "\x0c", "\x85", "\x1c"])
def test_reasons_of_one_line(tmp_path: Path, mark: str) -> None:
    """Only the end of a line ends one, so that a reason stays whole."""
    path = tmp_path / "known"
    path.write_text(f"0123456789abcdef 1 one{mark}two\n", encoding="utf-8")
    known = Baseline.read(path)
    known.write(path)
    assert [f"one{mark}two"] == [entry.reason for entry in Baseline.read(path).entries.values()]


@pytest.mark.parametrize("line", [f"{'a' * 16} {'9' * 5000} why", f"{'a' * 16}\t1\t# where"])
def test_lines_that_say_too_much_or_little(tmp_path: Path, line: str) -> None:
    """A number that nobody counts to is refused with its line; where it was is no reason."""
    path = tmp_path / "known"
    path.write_text(f"{line}\n")
    with pytest.raises(ValueError, match=f"cannot read {path}, line 1: "):
        Baseline.read(path, reasons=True)


def test_interrupted_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old file stays whole until the new one is."""
    path = tmp_path / "known"
    Baseline({"a" * 16: BaselineEntry("a" * 16, 1, "why")}).write(path)
    before = path.read_text()
    written = Path.write_text

    def interrupted(file: Path, text: str, **how: str) -> int:
        written(file, text[: len(text) // 2], **how)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Baseline({"b" * 16: BaselineEntry("b" * 16, 2, "another")}).write(path)
    assert before == path.read_text()


def test_a_reason_is_more_than_the_sign(tmp_path: Path) -> None:
    """A line that ends with the sign of what follows has no reason."""
    path = tmp_path / "known"
    path.write_text("0123456789abcdef 1 #\n")
    with pytest.raises(ValueError, match="line 1: it must have a reason"):
        Baseline.read(path, reasons=True)
