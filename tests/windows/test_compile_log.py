"""`compile_log=True`: what torch compiles in a window is in its trace, and in a log beside it."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import instrument
from instrument.base.guard import guard
from instrument.base.run_folder import entry_of, files_of, last_window, traces_in
from instrument.read.profilers.compile_log import read_compile_logs

from ..support import programs, warm
from .training import content, manifest, obstruct, reasons, run, statuses, traces

TORCH_LOGGER = "torch.__trace"


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    before = list(logging.getLogger(TORCH_LOGGER).handlers)
    yield
    assert set(logging.getLogger(TORCH_LOGGER).handlers) <= set(before)
    torch.compiler.reset()


def compiled(number: int = 0) -> Any:
    """Return a compiled function; torch compiles it again when it gets another size."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + number

    return torch.compile(double, backend="eager", dynamic=False)


def phases(trace: Path) -> set[str]:
    """Return the phases of compilations in a trace."""
    found = (re.fullmatch(r"(.+) \(dynamo_timed\)", event["name"]) for event in content(trace)["traceEvents"])
    return {match[1] for match in found if match}


def test_a_window_with_the_first_call(out: Path) -> None:
    """Its trace has the phases of the compilation, its log the function; a window without compilation has none."""
    function = compiled()
    run(out, lambda _: function(torch.ones(3)), schedule="0-1,4-5", compile_log=True)
    assert [(1, "recorded"), (2, "recorded")] == statuses(manifest(out))
    (log,) = out.glob("*/*.compile.log")
    first, second = (path for path in traces(out) if path.suffix == ".gz")
    assert log.name == first.name.replace(".pt.trace.json.gz", ".compile.log")
    (compilation,) = read_compile_logs([log]).compilations
    assert (__file__, "double") == (compilation.site.file, compilation.site.function)
    assert "_compile.compile_inner" in phases(first)
    assert not phases(second)


def test_the_log_is_a_file_of_the_window(out: Path, tmp_path: Path) -> None:
    """The manifest names it, an upload copies it, retention removes it; readers still find the trace."""
    pytest.importorskip("fsspec")
    function, remote = compiled(), tmp_path / "remote"
    schedule, keep = instrument.schedule("0-1,4-5"), instrument.keep(windows=1)
    run(
        out, lambda number: function(torch.ones(3 + number // 4)), schedule=schedule, compile_log=True,
        upload=f"file://{remote}", keep=keep,
    )  # fmt: skip
    lines = [line for line in manifest(out) if "event" not in line]
    for line in lines:
        trace, log = files_of(line)
        assert (trace.partition(".pt.")[0], ".compile.log") == (log.removesuffix(".compile.log"), log[-12:])
        assert [(remote / file["path"]).stat().st_size for file in line["files"]] == [
            file["bytes"] for file in line["files"]
        ]
    (removed,) = [line for line in manifest(out) if line.get("event") == "removed"]
    assert sorted(files_of(lines[0])) == sorted(files_of(removed))
    (left,) = traces_in(out)
    assert out / files_of(lines[1])[0] == left[0]
    assert lines[1] == entry_of(left[0])
    assert str(left[0].parent) == last_window(str(out))


@pytest.mark.usefixtures("lenient")
def test_a_log_beside_a_trace_that_is_not_compressed(out: Path) -> None:
    """The line of the window names both."""
    function = compiled()
    run(out, lambda _: function(torch.ones(3)), schedule="0-1", compile_log=True, on_trace_ready=obstruct)
    (line,) = manifest(out)
    assert [".json", ".log"] == [Path(path).suffix for path in files_of(line)]


def test_without_the_argument(out: Path) -> None:
    """There is no log."""
    function = compiled()
    run(out, lambda _: function(torch.ones(3)), schedule="0-1")
    assert [] == list(out.glob("*/*.compile.log"))


def test_a_diagnosis_reads_the_logs_of_the_run(out: Path) -> None:
    """A diagnosis of a window says why code was compiled again, also in an earlier window."""
    function = compiled()
    run(out, lambda number: function(torch.ones(3 + min(number, 2))), schedule="0-3,6-7", compile_log=True)
    last = [path for path in traces(out) if path.suffix == ".gz"][-1]
    found = {finding.rule: finding for finding in instrument.diagnose(last).findings}
    assert "double was recompiled 2 times" in found["recompilations"].title
    assert "size mismatch" in found["recompilations"].title


def test_a_window_without_a_trace_leaves_no_log(out: Path) -> None:
    """A window that ends in its warm-up removes what it wrote, and torch's logger is as before."""
    function = compiled()
    schedule = instrument.schedule(at=12, warmup=5)
    run(out, lambda _: function(torch.ones(3)) if _ > 7 else None, schedule=schedule, compile_log=True)
    assert [("skipped", "the loop ended before step 10, in warm-up")] == reasons(manifest(out))
    assert [] == [path for path in out.rglob("*") if path.is_file() and path.name != "manifest.jsonl"]


@pytest.mark.usefixtures("lenient")
def test_a_log_that_cannot_be_written(out: Path) -> None:
    """The compilation goes on, and the failure is noted."""
    out.parent.mkdir(parents=True)
    out.write_text("")
    function = compiled()
    run(out, lambda _: function(torch.ones(3)), schedule="0-1", compile_log=True)
    assert guard.failures["the log of torch.compile"] >= 1


def test_the_option_of_run(tmp_path: Path) -> None:
    """`instrument run --compile-log` writes the log of a program that compiles."""
    code = """
        import torch
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        function = torch.compile(lambda x: x * 2, backend="eager")
        for number in range(5):
            if number > 1:
                function(torch.ones(3))
            model(torch.ones(2)).sum().backward()
            optimizer.step()
    """
    script = programs.program(code, tmp_path)
    options = ["--compile-log", "--steps", "2-3", "-o", "out"]
    line = ["-m", "instrument", "run", *options, "--", sys.executable, str(script)]
    warm.run(programs.python(Path("-m"), line[1:]), programs.environment(), cwd=tmp_path, check=True)
    (log,) = (tmp_path / "out").glob("window-0001/*.compile.log")
    assert 1 == len(read_compile_logs([log]).compilations)


def test_wrong_values(out: Path) -> None:
    """The argument is True or False."""
    with pytest.raises(TypeError, match='"compile_log" must be True or False: 1'):
        instrument.profile(out, compile_log=1)  # type: ignore[arg-type]
