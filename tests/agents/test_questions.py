"""Questions about real traces: the answers of the tools hold the expected numbers, and no forbidden claim.

`questions.json` has the questions. Each number expected comes from exact arithmetic of another program
(`tests/data/reference_values.json`), was counted in a file of a public repository, which "from" names and
`tests/data/traces.json` lists, or is computed here from the raw file.
"""

from __future__ import annotations

import functools
import gzip
import json
import pickle
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

from tests.agents.client import Answers, asked
from tests.support.shared_traces import FOLDER, shared

pytestmark = pytest.mark.corpus

QUESTIONS = json.loads(Path(__file__).with_name("questions.json").read_text())
REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "reference_values.json").read_text())[
    "exact_all_traces"
]
RANKS = [f"param_dlrm_8rank_r{rank}.json.gz" for rank in range(8)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    """Return a server for the real traces, and a folder with the ranks of a job."""
    shared("tl_h100_bert_small.json.gz")
    folder = tmp_path_factory.mktemp("served")
    (folder / "dlrm").mkdir()
    for name in RANKS:
        (folder / "dlrm" / name).write_bytes(shared(name).read_bytes())
    with asked(FOLDER, folder) as made:
        yield made


@functools.cache
def events(name: str) -> list[dict[str, Any]]:
    """Return the events of a file, read by the standard library."""
    data = shared(name).read_bytes()
    text = gzip.decompress(data) if name.endswith(".gz") else data
    read = json.loads(text, parse_float=Decimal, strict=False)
    return [event for event in read["traceEvents"] if event.get("ph") == "X"]


def nanoseconds(event: dict[str, Any]) -> int:
    return int(Decimal(event["dur"]) * 1000)


def raw(name: str, category: str, pattern: str, what: str) -> int:
    """Return a number of the events of a category whose name matches."""
    found = [each for each in events(name) if each.get("cat") == category and re.search(pattern, each["name"])]
    if what == "count":
        return len(found)
    if what == "sum_bytes":
        return sum(int(each["args"]["bytes"]) for each in found)
    return {"sum_ns": sum, "max_ns": max}[what](map(nanoseconds, found))


def median_step(name: str) -> int:
    """Return the lower median of the lengths of the steps."""
    lengths = sorted(nanoseconds(each) for each in events(name) if each["name"].startswith("ProfilerStep"))
    return lengths[(len(lengths) - 1) // 2]


def expected_number(source: dict[str, Any]) -> float:
    """Return what a question expects."""
    if "reference" in source:
        name, *keys = source["reference"]
        return functools.reduce(lambda value, key: value[key], keys, REFERENCE[name])
    if "raw" in source:
        return raw(*source["raw"])
    if "median_step" in source:
        return median_step(source["median_step"])
    if "ratio" in source:
        (all_of, but), of = source["ratio"]
        return (all_of - but) / of
    if "snapshot" in source:
        path, key = source["snapshot"]
        return sum(each[key] for each in pickle.loads(shared(path).read_bytes())["segments"])
    return source["value"]


def at(answer: Any, path: list[Any]) -> Any:
    """Return the value at a path of keys, numbers of rows, and values by which a row is chosen."""
    for step in path:
        if isinstance(step, dict):
            ((key, value),) = step.items()
            place: Any = int(key) if key.isdecimal() else key
            answer = next(row for row in answer if row[place] == value)
        else:
            answer = answer[step]
    return answer


def test_there_are_40_questions() -> None:
    """There are so many, and each expects or forbids something."""
    assert len(QUESTIONS) >= 40
    assert all(each.keys() & {"expected", "says"} for each in QUESTIONS)


@pytest.mark.parametrize("question", QUESTIONS, ids=[f"{number}" for number in range(len(QUESTIONS))])
def test_question(answers: Answers, question: dict[str, Any]) -> None:
    """The answer holds each expected number and sentence, and none that is forbidden."""
    answer = answers.ask(question["tool"], **question["arguments"])
    assert answer.refused == question.get("refused", False), answer.text
    for source in question.get("expected", []):
        assert at(answer.data, source["at"]) == pytest.approx(
            expected_number(source), rel=source.get("within", 1e-5)
        )
    assert len(answer.text.encode()) <= 3 * 4_000  # bytes of so many tokens
    for pattern in question.get("says", []):
        assert re.search(pattern, answer.text), answer.text
    for pattern in question.get("forbidden", []):
        assert not re.search(pattern, answer.text), answer.text
