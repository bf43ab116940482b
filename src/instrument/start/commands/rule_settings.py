"""The rules that the commands of a diagnosis apply, as pyproject.toml and the command line set them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...explain.diagnosis.diagnose import chosen_rules
from ...explain.rules.rule import load_rules
from .command import print_message

_TABLE = "tool.instrument.diagnose"


def rule_settings(ignore: list[str], change: list[str]) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Return the rules to ignore and the thresholds: those of pyproject.toml, then those of the command line.

    Args:
        ignore: the rules that the command line leaves out.
        change: its thresholds, each ``RULE.NAME=NUMBER``.

    Raises:
        ValueError: a rule or a threshold that does not exist, or a threshold that is not a number.
    """
    for name, error in load_rules():
        print_message(f"the rules of the entry point {name} cannot be imported: {error!r}")
    table = _pyproject()
    ignored = table.pop("ignore", [])
    if not isinstance(ignored, list):
        raise ValueError(f'"ignore" in [{_TABLE}] must be a list of rules: {ignored!r}')
    thresholds: dict[str, dict[str, float]] = {}
    for name, values in table.items():
        if not isinstance(values, Mapping):
            raise ValueError(f'"{name}" in [{_TABLE}] must be a table of thresholds: {values!r}')
        thresholds[name] = dict(values)
    for text in change:
        place, _, value = text.partition("=")
        name, _, threshold = place.rpartition(".")
        try:
            thresholds.setdefault(name, {})[threshold] = float(value)
        except ValueError:
            raise ValueError(f"--set must be RULE.NAME=NUMBER: {text!r}") from None
    chosen_rules([*ignored, *ignore], thresholds)
    return [*ignored, *ignore], thresholds


def _pyproject() -> dict[str, Any]:
    """Return the table of this command in the nearest pyproject.toml; empty without one."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    for folder in (Path.cwd(), *Path.cwd().parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            try:
                read = tomllib.loads(file.read_text(encoding="utf-8"))
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"cannot read {file}: {error}") from None
            return _table_of(read)
    return {}


def _table_of(read: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table `_TABLE` of what a pyproject.toml holds; empty without one."""
    table: Any = read
    for place, name in enumerate(names := _TABLE.split("."), 1):
        table = table.get(name, {})
        if not isinstance(table, Mapping):
            raise ValueError(f"[{'.'.join(names[:place])}] in pyproject.toml must be a table: {table!r}")
    return dict(table)
