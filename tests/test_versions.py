"""pyproject.toml: the oldest dependencies, and the description for a package index."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
from scripts.versions import ROOT, floors, requirements

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def test_floors() -> None:
    """The oldest version that a requirement accepts is chosen, whatever else it says."""
    required = ["torch>=2.6", "moto[server]>=5.0.1,<6", "tomli>=2; python_version < '3.11'"]
    assert floors(required) == ["torch==2.6", "moto==5.0.1", "tomli==2"]


def test_a_requirement_without_a_floor_is_named() -> None:
    """A requirement without an oldest version is refused by name."""
    with pytest.raises(ValueError, match=r'must begin with "NAME>=VERSION": rich, wrapt<2$'):
        floors(["torch>=2.6", "rich", "wrapt<2"])


def test_every_dependency_has_a_floor() -> None:
    """`make floors` can choose a version of each dependency."""
    assert len(floors(requirements())) == len(requirements()) > 5


def test_the_description_has_no_relative_links() -> None:
    """In the README for a package index, links within the repository are text, and its pictures are left out."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    text = (ROOT / "README.md").read_text()
    for each in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    assert re.findall(r"\]\((?!https:)", text) == []
    assert "](https://ui.perfetto.dev)" in text
    assert re.search(r"by \d+ rules\b", text)
    assert "![" not in text
