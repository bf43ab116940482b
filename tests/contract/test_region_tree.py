"""`RegionTree`: the regions of a step as text, and a difference that a person understands."""

from __future__ import annotations

from pathlib import Path

import pytest

from instrument.explain.contract.region_tree import RegionTree

STEP = """\
step
  data
  forward
    embed
    layer_0
      attention  x2
    layer_1
      attention  x2
  backward"""


def changes(before: str, after: str) -> list[str]:
    return RegionTree.from_text(before).changes(RegionTree.from_text(after))


def test_file(tmp_path: Path) -> None:
    """A file has a region a line, indented, with its calls; it is read as written."""
    tree = RegionTree.of({("step",): 1, ("step", "data"): 3, ("step", "data", "x  y"): 1})
    tree.write(tmp_path / "regions.txt")
    assert (tmp_path / "regions.txt").read_text().splitlines()[1:] == ["step", "  data  x3", "    x  y"]
    assert RegionTree.read(tmp_path / "regions.txt") == tree
    assert str(RegionTree.from_text(STEP)) == STEP
    tree.assert_same(tmp_path / "regions.txt")
    with pytest.raises(AssertionError, match=r"are not those in .*regions.txt:\nnew: step > other"):
        RegionTree.of({**tree.calls, ("step", "other"): 1}).assert_same(tmp_path / "regions.txt")


@pytest.mark.parametrize(
    "name", ["a  x3", "# data", "stage # 1", '"quoted"', " a", "a ", "", "two\nlines", "x\u2028y"]
)
def test_names_that_would_read_as_something_else(name: str, tmp_path: Path) -> None:
    """Any name is read as it was written."""
    tree = RegionTree.of({("step",): 1, ("step", name): 3, ("step", name, name): 1})
    tree.write(tmp_path / "regions.txt")
    assert RegionTree.read(tmp_path / "regions.txt") == tree
    assert RegionTree.from_text(str(tree)) == tree


def test_open_before() -> None:
    """A region that was open before the step is around those inside it."""
    assert str(RegionTree.of({("epoch", "step"): 2})) == "epoch\n  step  x2"


def test_modules() -> None:
    """A module has the part of its name that the one around it lacks, also in the backward pass."""
    paths = [("m",), ("m", "m.layer.0"), ("m", "m.layer.0", "m.layer.0.up")]
    backward = [tuple(f"{name} (backward)" for name in path) for path in paths]
    tree = RegionTree.of(dict.fromkeys([*paths, *backward], 1))
    assert str(tree).splitlines() == [
        "m", "  layer.0", "    up", "m (backward)", "  layer.0 (backward)", "    up (backward)"
    ]  # fmt: skip


def test_layers_are_joined() -> None:
    """More than eight names that differ in numbers are one; a ninth layer is no other tree."""

    def layers(count: int) -> RegionTree:
        return RegionTree.of({("step",): 1} | {("step", f"layer_{number}"): 1 for number in range(count)})

    assert str(layers(8)).count("layer") == 8
    assert str(layers(9)) == "step\n  layer_*  x9"
    assert layers(8).changes(layers(9)) == ["called more often: step > layer_*, 8 to 9 times"]
    assert layers(9).changes(layers(8)) == ["called less often: step > layer_*, 9 to 8 times"]
    assert layers(9).changes(layers(9)) == []


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("  data\n", "  data  x3\n", ["called more often: step > data, 1 to 3 times"]),
        ("  data\n", "", ["gone: step > data"]),
        ("    embed\n", "    embed\n    norm  x4\n", ["new: step > forward > norm, 4 times"]),
        ("    layer_0\n      attention  x2\n", "", ["gone: step > forward > layer_0, with 1 inside"]),
        ("forward", "train", ["renamed: step > forward to train"]),
        ("backward", "backward\n    embed", ["new: step > backward > embed"]),
        (
            "  data\n  forward\n    embed\n",
            "  forward\n    data\n    embed\n",
            ["moved: data, from step to step > forward"],
        ),
        ("  data\n  forward", "  forward", ["gone: step > data"]),
    ],
)
def test_changes(before: str, after: str, expected: list[str]) -> None:
    """Regions that are gone, new, renamed, moved or called more often are said as such, without those inside."""
    assert before in STEP
    assert changes(STEP, STEP.replace(before, after, 1)) == expected


def test_order() -> None:
    """A region that comes at another place among those beside it is named."""
    four = "a\nb\nc\nd"
    assert changes(four, "b\nc\na\nd") == ["other order: a is after c now"]
    assert changes(four, "d\na\nb\nc") == ["other order: d is first now"]
    assert changes(four, "a\nc\nd") == ["gone: b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step\n    data", "line 2"),
        (" step", "line 1"),
        ("a\na", "line 2 has a region for the second"),
        ('"a', "line 1 has a name"),
    ],
)
def test_wrong_files(text: str, message: str, tmp_path: Path) -> None:
    """A line that cannot be read is named, with its file."""
    (tmp_path / "regions.txt").write_text(text)
    with pytest.raises(ValueError, match=f"cannot read .*regions.txt: {message}"):
        RegionTree.read(tmp_path / "regions.txt")
