"""`NumberFile`: the file of numbers that a project holds, and what moved."""

from __future__ import annotations

import linecache
import subprocess
from pathlib import Path

import pytest

from instrument.base.findings import Site
from instrument.explain.contract.number_file import NumberFile, Part
from instrument.explain.contract.numbers import Number, Numbers, Spot

CODE = """\
def up(x):
    x = x @ x
    return x.relu()
def down(x):
    y = x + 1
    return y.sum()
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").touch()
    file = tmp_path / "model.py"
    file.write_text(CODE)
    return file


def spot(code: Path, line: int, *region: str) -> Spot:
    return Spot(region or ("step",), Site(str(code), line, "up" if line < 4 else "down"))


def numbers(**by_name: Number | int) -> Numbers:
    named = {name.replace("__", "."): number for name, number in by_name.items()}
    return Numbers({name: each if isinstance(each, Number) else Number(each) for name, each in named.items()})


def of_places(code: Path, **values: int) -> Number:
    """Return a number with parts at lines: ``of_places(code, at2=3, at5=1)``."""
    places = {spot(code, int(name[2:])): value for name, value in values.items()}
    return Number(sum(values.values()), places)


def held(text: str, folder: Path) -> NumberFile:
    file = folder / "held.txt"
    file.write_text(text)
    return NumberFile.read(file)


def test_file(code: Path, tmp_path: Path) -> None:
    """A file has a line for each number, and one for each place where there are several; it is read as written."""
    path = tmp_path / "perf.txt"
    gemm = of_places(code, at2=3, at5=1)
    found = numbers(
        kernels=5, kernels__gemm=gemm, kernels__copy=of_places(code, at6=1), syncs=0, peak=Number(9, {}, False)
    )
    NumberFile.of(found).write(path)
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert lines == [
        "kernels.copy 1  # step, model.py in down: return y.sum()",
        "kernels.gemm 4",
        "    1  # step, model.py in down: y = x + 1",
        "    3  # step, model.py in up: x = x @ x",
        "peak ~9",
        "syncs 0",
    ]
    assert NumberFile.read(path) == NumberFile.of(found)
    assert NumberFile.read(path).changes(found) == []


def test_what_moved(code: Path) -> None:
    """A change has its places, those with the greatest difference first; equal totals are no change."""
    before = numbers(kernels__gemm=of_places(code, at2=3, at5=1), syncs=of_places(code, at3=2))
    after = numbers(kernels__gemm=of_places(code, at2=4, at6=4), syncs=of_places(code, at5=2))
    (change,) = NumberFile.of(before).changes(after)
    assert (change.name, change.was, change.now, change.better) == ("kernels.gemm", 4, 8, False)
    assert change.parts == (
        Part("step, model.py in down: return y.sum()", spot(code, 6), 0, 4),
        Part("step, model.py in down: y = x + 1", None, 1, 0),
        Part("step, model.py in up: x = x @ x", spot(code, 2), 3, 4),
    )
    (back,) = NumberFile.of(after).changes(before)
    assert back.better


def test_a_changed_line_is_the_same_place(code: Path) -> None:
    """A line with another text, or in another region, is compared with what it was."""
    before = NumberFile.of(numbers(kernels=of_places(code, at2=3, at5=1)))
    code.write_text("\n" + CODE.replace("x @ x", "x @ x @ x"))
    linecache.clearcache()
    after = numbers(kernels=Number(5, {spot(code, 3, "train"): 4, spot(code, 6, "train"): 1}))
    (change,) = before.changes(after)
    assert [(part.was, part.now) for part in change.parts] == [(3, 4)]


def test_reasons_are_kept(code: Path, tmp_path: Path) -> None:
    """An update keeps the reasons, also that of a line whose text is another now."""
    before = held(
        "kernels 4  a wide model\n"
        "    3  both halves  # step, model.py in up: x = x @ x\n"
        "    1  # step, model.py in down: y = x + 1\n"
        "syncs 1  the loss is logged  # step, model.py in up: return x.relu()\n",
        tmp_path,
    )
    code.write_text(CODE.replace("x @ x", "x @ x @ x"))
    linecache.clearcache()
    found = numbers(kernels=of_places(code, at2=4, at5=1), syncs=of_places(code, at3=2))
    fresh = NumberFile.of(found, before)
    assert (fresh.held["kernels"].reason, fresh.held["syncs"].reason) == ("a wide model", "the loss is logged")
    assert fresh.held["kernels"].reasons == {"step, model.py in up: x = x @ x @ x": "both halves"}
    fresh.write(tmp_path / "perf.txt")
    assert NumberFile.read(tmp_path / "perf.txt") == fresh
    assert "    4  both halves  # step, model.py in up: x = x @ x @ x\n" in (tmp_path / "perf.txt").read_text()


def test_written_by_hand(tmp_path: Path) -> None:
    """A file may hold some numbers only, and sums instead of their parts; an update keeps that form."""
    found = numbers(kernels=6, kernels__gemm=4, kernels__copy=2, syncs=1, flops=7)
    file = held("kernels 5  all of them\nsyncs 1\n", tmp_path)
    assert [change.name for change in file.changes(found)] == ["kernels"]
    assert file.missing(found) == ["flops"]
    assert {name: each.value for name, each in NumberFile.of(found, file).held.items()} == {
        "flops": 7,
        "kernels": 6,
        "syncs": 1,
    }
    assert NumberFile.of(found, file).held["kernels"].reason == "all of them"


def test_other_names(tmp_path: Path) -> None:
    """A part that the file lacks was 0, one that is no longer there is 0; a name that nothing has is refused."""
    found = numbers(kernels=6, kernels__gemm=4, kernels__copy=2)
    moved = held("kernels.gemm 4\nkernels.sort 1\n", tmp_path).changes(found)
    assert [(change.name, change.was, change.now) for change in moved] == [
        ("kernels.copy", 0, 2),
        ("kernels.sort", 1, 0),
    ]
    with pytest.raises(ValueError, match=r"unknown number kernel; known numbers: kernels, kernels\.copy"):
        held("kernel 4\n", tmp_path).changes(found)


def test_tolerance(tmp_path: Path) -> None:
    """Only numbers that are not exact may differ, by 5 %; an update keeps what is in the file then."""
    for value, moved in ((104, False), (96, False), (106, True), (94, True)):
        found = numbers(peak=Number(value, {}, exact=False), kernels=100)
        file = held("peak ~100\nkernels 100\n", tmp_path)
        assert bool(file.changes(found)) == moved
        assert NumberFile.of(found, file).held["peak"].value == (value if moved else 100)
    assert held("kernels ~100\n", tmp_path).changes(numbers(kernels=101))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kernels\n", "line 1: no name, number and reason: 'kernels'"),
        ("kernels -1\n", "line 1"),
        ("\n    3  # x\n", "line 2"),
        ("kernels 1\nkernels 2\n", "line 2: kernels is listed twice"),
        ("<<<<<<< ours\nkernels 1\n=======\n", "line 1: a conflict of a merge; --update solves it"),
    ],
)
def test_wrong_files(text: str, message: str, tmp_path: Path) -> None:
    """A line that cannot be read is named."""
    with pytest.raises(ValueError, match=message):
        held(text, tmp_path)


def git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    named = ["-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", *named, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def test_merge(code: Path, tmp_path: Path) -> None:
    """Branches that each add a kernel at another place merge into a file with both, also where totals conflict."""
    path = tmp_path / "perf.txt"
    both = {"at2": 1, "at3": 1, "at5": 1, "at6": 1}

    def write(**values: int) -> None:
        before = NumberFile.read(path, conflicts=True) if path.exists() else None
        NumberFile.of(numbers(kernels=of_places(code, **(both | values))), before).write(path)

    write()
    git(tmp_path, "init")
    for branch, values in (("one", {"at5": 2}), ("two", {"at2": 2}), ("three", {"at2": 4})):
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-qm", "start")
        git(tmp_path, "checkout", "-qb", branch, "main")
        write(**values)
        git(tmp_path, "commit", "-qam", branch)
        git(tmp_path, "checkout", "-q", "main")
    assert git(tmp_path, "merge", "-q", "one").returncode == 0
    assert git(tmp_path, "merge", "-q", "two").returncode == 0
    merged = NumberFile.read(path)
    assert merged.held["kernels"].value == 6  # though each branch has written 5
    assert merged.changes(numbers(kernels=of_places(code, **(both | {"at5": 2, "at2": 2})))) == []
    assert git(tmp_path, "merge", "-q", "three").returncode == 1
    with pytest.raises(ValueError, match="conflict of a merge"):
        NumberFile.read(path)
    write(at5=2, at2=5)
    assert NumberFile.read(path).held["kernels"].value == 9


def test_limits(code: Path) -> None:
    """A limit that is exceeded is said with the largest places; sizes may be in megabytes."""
    found = Numbers(
        {"peak_bytes": of_places(code, at2=80_000_000, at5=3_000_000), "syncs": Number(0)}, ["kernels.sort"]
    )
    assert found.over({"peak_mb": 83, "syncs": 0, "kernels.sort": 0}) is None
    reason = found.over({"peak_mb": 82.5})
    assert reason is not None
    assert reason.splitlines()[0] == (
        "peak_bytes is 83.0 MB (83,000,000 bytes); allowed: 82.5 MB (82,500,000 bytes)"
    )
    assert reason.splitlines()[1].startswith("    80.0 MB (80,000,000 bytes) at step, ")
    with pytest.raises(ValueError, match=r"unknown number 'sort'; known numbers: kernels\.sort, peak_bytes"):
        found.over({"sort": 0})
    with pytest.raises(TypeError, match='"syncs" must be a number: True'):
        found.assert_max(syncs=True)
    again = Numbers.from_dict(found.to_dict())
    assert NumberFile.of(again) == NumberFile.of(found)
    assert again.over({"peak_bytes": 0}) == found.over({"peak_bytes": 0})
