"""The structured log of torch.compile: kernels, their lines, compilations and their reasons."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import instrument
from instrument.base.errors import TraceError
from instrument.explain.diagnosis.diagnose import diagnosis_of
from instrument.explain.rules.trace_facts import TraceFacts
from instrument.read.profilers.compile_log import PATTERN, CompileLog, read_compile_logs
from tests.diagnosis.made_loops import MadeLoop
from tests.diagnosis.test_diagnose import write
from tests.support.shared_traces import shared

HEAD = "V1124 03:00:21.845000 15903 torch/_dynamo/output_graph.py:2841] "
IN_FRAME = '"frame_id": 0, "frame_compile_id": 0'
METRICS = (
    '"co_name": "f", "co_filename": "/src/train.py", "co_firstlineno": 2, "dynamo_cumulative_compile_time_us":'
)
LOG = f"""{HEAD}{{"dynamo_output_graph": {{"sizes": {{}}}}, {IN_FRAME}}}
\tclass GraphModule(torch.nn.Module):
\t    def forward(self, L_x_: "f32[8, 8][8, 1]cuda:0"):
\t        # File: /src/train.py:4 in f, code: z = gelu(x + y)
\t        add: "f32[8, 8][8, 1]cuda:0" = l_x_ + l_y_;  l_x_ = l_y_ = None
\t        z: "f32[8, 8][8, 1]cuda:0" = torch._C._nn.gelu(add);  add = None
\t        # File: /src/train.py:5 in f, code: return z * 2
\t        mul = z * 2;  z = None
{HEAD}{{"inductor_output_code": {{"filename": "/tmp/a.py"}}, {IN_FRAME}}}
\t# Topologically Sorted Source Nodes: [add, z, mul], Original ATen: [aten.add, aten.gelu, aten.mul]
\ttriton_poi_fused_add_gelu_0 = async_compile.triton('triton_poi_fused_add_gelu_0', '''
\ttriton_poi_plain_1 = async_compile.triton('triton_poi_plain_1', '''
{HEAD}{{"compilation_metrics": {{"compile_id": "0/0", {METRICS} 61000000,
"""
LOG = (
    LOG.rstrip("\n")
    + f""" "inductor_cumulative_compile_time_us": 5}}, {IN_FRAME}}}
{HEAD}{{"compilation_metrics": {{"compile_id": "0/1", {METRICS} 1000, "recompile_reason": "0/0: size changed"}}}}
"""
)


def read(folder: Path, text: str) -> CompileLog:
    path = folder / "dedicated_log_torch_trace_a.log"
    path.write_text(text)
    return read_compile_logs([path])


def test_kernels_and_compilations(tmp_path: Path) -> None:
    """Kernels have the operators and lines of their nodes; compilations have times and reasons."""
    log = read(tmp_path, LOG)
    fused, plain = log.kernels.values()
    assert fused.operators == ("aten.add", "aten.gelu", "aten.mul")
    assert [str(site) for site in fused.sites] == ["/src/train.py:4", "/src/train.py:5"]
    assert (plain.name, plain.operators, plain.sites) == ("triton_poi_plain_1", (), ())
    first, second = log.compilations
    assert (first.name, str(first.site), first.total_ns) == ("0/0", "/src/train.py:2", 61 * 10**9)
    assert (first.inductor_ns, first.reason) == (5000, "")
    assert (second.reason, second.inductor_ns) == ("0/0: size changed", None)


def test_reasons_of_older_versions(tmp_path: Path) -> None:
    """A version that writes the reasons in a record of its own, as torch 2.6 does, has the first of them."""
    artifact = '{"name": "recompile_reasons", "encoding": "json"}'
    frame = '"frame_id": 0, "frame_compile_id": 1'
    again = f"""{HEAD}{{"artifact": {artifact}, {frame}}}
\t[
\t"0/1: size changed",
\t"0/0: dtype changed"
\t]
{HEAD}{{"compilation_metrics": {{"compile_id": "0/1", {METRICS} 1000}}, {frame}}}
"""
    assert [each.reason for each in read(tmp_path, LOG + again).compilations][2:] == ["0/1: size changed"]
    for before, after in (('"0/1: size changed",', "{"), ("\t[\n", "\t\n"), (artifact, "[]")):
        (damaged,) = read(tmp_path, LOG + again.replace(before, after)).compilations[2:]
        assert damaged.reason == ""


def test_rules(tmp_path: Path) -> None:
    """With the log, rules name the lines of a kernel, why code was compiled again, and how long that took."""
    loop = MadeLoop(busy=False)
    for start in (0, 1000, 2000):
        loop.work("triton_poi_fused_add_gelu_0", start, start + 1, start + 999)
    facts = TraceFacts(loop.trace(), compile_log=read(tmp_path, LOG))
    found = {each.rule: each for each in diagnosis_of(facts).findings}
    kernel = found["generated-kernels"]
    assert kernel.title == "triton_poi_fused_add_gelu_0 takes 998 us per step: it computes train.py:4, train.py:5"
    assert str(kernel.where.site) == "/src/train.py:4"
    assert found["recompilations"].title == "f was recompiled 1 time, in 1.00 ms: 0/0: size changed"
    assert found["compile-time"].title == "torch.compile took 61.0 s in the run, most of it for f"


def test_where_the_log_is_found(tmp_path: Path) -> None:
    """Logs beside the trace are read; a damaged one there is ignored, one that is given is an error."""
    path = write(tmp_path / "one.json", MadeLoop())
    assert instrument.diagnose(path).abstained["compile-time"].startswith("there is no log of torch.compile")
    log = tmp_path / "dedicated_log_torch_trace_rank0_x.log"
    log.write_text(LOG)
    for place in (None, log, tmp_path):
        rules = {each.rule for each in instrument.diagnose(path, compile_log=place).findings}
        assert {"compile-time", "recompilations"} <= rules
    log.write_text("no log")
    assert "compile-time" in instrument.diagnose(path).abstained
    with pytest.raises(TraceError, match="it is no log of torch"):
        instrument.diagnose(path, compile_log=log)
    log.unlink()
    with pytest.raises(FileNotFoundError):
        instrument.diagnose(path, compile_log=tmp_path)


@given(st.text(), st.integers(0, len(LOG)))
def test_damaged_logs(tmp_path_factory: pytest.TempPathFactory, junk: str, at: int) -> None:
    """Damage costs only the records around it."""
    folder = tmp_path_factory.mktemp("log")
    try:
        read(folder, (LOG[:at] + junk + LOG[at:]).encode(errors="replace").decode())
    except TraceError as error:
        assert "no log" in str(error)


@pytest.mark.parametrize(
    ("name", "kernel", "lines"),
    [
        ("inductor_provenance_jit_cuda_log.txt", "triton_poi_fused_addmm_gelu_2", [34]),
        ("cache_hit_miss.log", "triton_tem_fused_0", [1286]),
        ("simple.log", "triton_poi_fused_baz_gelu_native_dropout_1", [11120, 11119, 11125]),
    ],
)
def test_real_logs(name: str, kernel: str, lines: list[int]) -> None:
    """Kernels of logs by several versions of torch have their lines."""
    log = read_compile_logs([shared(f"compile/{name}")])
    assert [site.line for site in log.kernels[kernel].sites] == lines


@pytest.mark.process
def test_the_log_of_the_installed_torch(tmp_path: Path) -> None:
    """A log that the installed torch writes has the compilations, and why there was a second one."""
    script = tmp_path / "c.py"
    script.write_text(
        "import torch\n"
        "@torch.compile(backend='aot_eager')\n"
        "def f(x):\n    return torch.nn.functional.gelu(x) * 2\n"
        "f(torch.ones(8, 8)); f(torch.ones(9, 8))\n"
    )
    environment = os.environ | {"TORCH_TRACE": str(tmp_path / "log")}
    subprocess.run([sys.executable, str(script)], env=environment, check=True, capture_output=True)
    first, second = read_compile_logs(list((tmp_path / "log").glob(PATTERN))).compilations
    assert (first.name, first.site.function, first.site.file, first.reason) == ("0/0", "f", str(script), "")
    assert first.total_ns > 0
    assert "size" in second.reason
