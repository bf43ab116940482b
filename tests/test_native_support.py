"""The recorders that other tests rely on, checked with plain nvtx, ITT and rocTX calls."""

from __future__ import annotations

import importlib.util
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import native, nsys
from tests.support.programs import shell_script
from tests.support.ranges import Range, outline, tree

needs_nvtx = pytest.mark.skipif(importlib.util.find_spec("nvtx") is None, reason="nvtx is not installed")
pytestmark = pytest.mark.native

# Under a disabled tool nvtx returns dummies; this code creates a real domain, as a bridge does.
DOMAIN = """
    import os, threading
    import nvtx
    from nvtx._lib import lib

    answer = type(nvtx.get_domain("shop")).__name__
    if path := os.environ.get("ANSWER"):
        open(path, "w").write(answer)
    domain = nvtx.get_domain("shop")
    if answer == "DummyDomain":
        domain = object.__new__(lib.Domain)
        domain.handle = lib.DomainHandle("shop")
        domain.__init__("shop")
"""

# The functions of nvtx._lib take the same arguments in every release; Domain has methods only since 0.2.12.
CALLS = f"""{DOMAIN}
    attributes, handle = domain.get_event_attributes, domain.handle
    outer = attributes("outer", color=0xFF112233, category="till", payload=7)
    inner = attributes("inner", payload=0.5)
    lib.push_range(outer, handle)
    lib.push_range(inner, handle)
    lib.mark(attributes("paid", color="green"), handle)
    lib.pop_range(handle)
    first = lib.start_range(attributes("first"), handle)
    second = lib.start_range(attributes("second"), handle)
    nvtx.end_range(first)
    thread = threading.Thread(target=nvtx.end_range, args=(second,))
    thread.start()
    thread.join()
    lib.pop_range(handle)
"""

REAL = {"enabled": "Domain", "disabled": "DummyDomain", "no-slot": "Domain", "init-fails": "DummyDomain"}


def check_calls(found: list[Range], marks: list[Range]) -> None:
    """Check the ranges and marks of CALLS, from any recorder."""
    assert outline(r for r in found if r.kind == "push_pop") == "outer\n  inner"
    by_name = {r.name: r for r in found}
    outer, inner, first, second = (by_name[name] for name in ("outer", "inner", "first", "second"))
    assert (outer.domain, outer.color, outer.category, outer.payload) == ("shop", 0xFF112233, "till", 7)
    assert (inner.domain, inner.category, inner.payload) == ("shop", None, 0.5)
    assert (outer.depth, outer.parent, inner.depth, inner.parent) == (0, None, 1, "outer")
    assert [first.kind, second.kind] == ["start_end", "start_end"]
    assert first.start < second.start < first.end < second.end
    assert first.end_thread == first.thread == outer.thread != second.end_thread
    assert [(mark.name, mark.domain) for mark in marks] == [("paid", "shop")]
    assert outer.start < inner.start < marks[0].start < inner.end < outer.end


@needs_nvtx
@pytest.mark.parametrize("mode", native.MODES)
def test_nvtx_log_records_every_call_in_each_mode(mode: native.Mode, tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    events = native.nvtx_log(CALLS, mode=mode, env={"ANSWER": str(answer)})
    check_calls(native.ranges(events), native.marks(events))
    pushes = [event for event in events if event["op"] == "push"]
    assert [event["registered"] for event in pushes] == [True, True]
    if _nvtx_queries_the_tool():
        assert answer.read_text() == REAL[mode]


@needs_nvtx
def test_nvtx_log_without_the_extension() -> None:
    events = native.nvtx_log(CALLS, extension=False)
    check_calls(native.ranges(events), native.marks(events))
    assert not [event for event in events if event["op"] in ("extension", "is_enabled")]


@needs_nvtx
def test_default_domain_has_no_name() -> None:
    found = native.ranges(native.nvtx_log("import nvtx\nwith nvtx.annotate('x'): pass"))
    assert [(r.name, r.domain) for r in found] == [("x", None)]


@needs_nvtx
def test_text_survives_the_log_and_the_source(tmp_path: Path) -> None:
    text = 'quote " backslash \\ newline \n tab \t bell \x07 é 漢'
    script = tmp_path / "file.py"
    script.write_text(f"import nvtx\nwith nvtx.annotate({text!r}): pass", encoding="utf-8")
    assert [r.name for r in native.ranges(native.nvtx_log(script))] == [text]


@needs_nvtx
def test_a_killed_program_leaves_its_log() -> None:
    script = "import nvtx, os, sys\nnvtx.push_range(sys.argv[1])\nos.kill(os.getpid(), 9)"
    events = native.nvtx_log(script, args=["last words"], check=False)
    assert events[-1]["message"] == "last words"
    with pytest.raises(AssertionError, match=r"never closed.*last words"):
        native.ranges(events)
    assert native.ranges(events, balanced=False) == []


@needs_nvtx
def test_threads_and_forked_children_have_separate_stacks() -> None:
    script = """
        import os, threading
        import nvtx

        def work(name):
            for _ in range(200):
                with nvtx.annotate(name), nvtx.annotate("inner"):
                    pass

        threads = [threading.Thread(target=work, args=(f"thread {i}",)) for i in range(4)]
        [thread.start() for thread in threads]
        child = os.fork()
        if child == 0:
            work("child")
            os._exit(0)
        [thread.join() for thread in threads]
        os.waitpid(child, 0)
    """
    found = native.ranges(native.nvtx_log(script))
    assert len(found) == 5 * 200 * 2
    assert {r.parent for r in found if r.name == "inner"} == {*(f"thread {i}" for i in range(4)), "child"}
    assert len({r.process for r in found}) == 2


def test_ranges_reports_an_excess_pop() -> None:
    pop = {"op": "pop", "t": 1, "pid": 1, "tid": 1, "domain": None, "depth": -1}
    with pytest.raises(AssertionError, match="pop with nothing open"):
        native.ranges([pop])


def test_tree_leaves_crossing_ranges_side_by_side() -> None:
    def span(name: str, start: int, end: int, thread: int = 1) -> Range:
        return Range(name=name, start=start, end=end, kind="start_end", thread=thread, process=1)

    spans = [span("all", 0, 10), span("a", 1, 5), span("b", 3, 8), span("c", 6, 7), span("other", 2, 3, 2)]
    assert outline(spans) == "all\n  a\n  b\n    c\nother"
    assert [node.range.name for node in tree(spans)] == ["all", "other"]


def test_a_failing_program_shows_what_it_printed() -> None:
    with pytest.raises(AssertionError, match=r"ended with 3[\s\S]*over here"):
        native.nvtx_log("import sys; print('over here'); sys.exit(3)")


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\"mode\" must be one of .*: 'maybe'"):
        native.nvtx_log("", mode="maybe")  # type: ignore[arg-type]


def test_build_is_cached_by_content_and_defines() -> None:
    assert native.build("roctxlog") == native.build("roctxlog")
    assert native.build("roctxlog") != native.build("roctxlog", 'LIBRARY_NAME="other"')


def test_a_library_is_built_once(tmp_path: Path) -> None:
    """Of two builds of one library at the same time, the second waits for the first."""
    compiler = shell_script(tmp_path / "cc", f'echo begun >> {tmp_path}/calls; sleep 0.2; touch "$2"')
    library = tmp_path / "library.so"
    with ThreadPoolExecutor(2) as builds:
        list(builds.map(native.compile_once, [library] * 2, [[str(compiler)]] * 2))
    assert library.exists()
    assert "begun\n" == (tmp_path / "calls").read_text()


def test_build_skips_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(pytest.skip.Exception, match="no C compiler: no-such-compiler"):
        native.build("roctxlog")


def test_itt_log_of_ittapi() -> None:
    pytest.importorskip("ittapi")
    script = """
        import ittapi

        domain = ittapi.domain("shop")
        with ittapi.task("outer", domain="shop"):
            ittapi.task_begin(domain, ittapi.string_handle("inner"))
            ittapi.task_end(domain)
        task_id = ittapi.id(domain)
        ittapi.task_begin_overlapped(domain, ittapi.string_handle("crossing"), task_id)
        ittapi.task_end_overlapped(domain, task_id)
        ittapi.pause()
        ittapi.resume()
    """
    events = native.itt_log(script)
    found = native.ranges(events)
    assert outline(found) == "outer\n  inner\ncrossing"
    assert {r.domain for r in found} == {"shop"}
    assert [r.kind for r in found] == ["push_pop", "push_pop", "start_end"]
    assert [event["op"] for event in events if event["op"] in ("pause", "resume")] == ["pause", "resume"]


def test_itt_log_of_torch() -> None:
    torch = pytest.importorskip("torch")
    if not torch.profiler.itt.is_available():
        pytest.skip("this torch is built without ITT")
    script = """
        from torch.profiler import itt

        itt.range_push("outer")
        itt.mark("instant")
        itt.range_pop()
    """
    found = native.ranges(native.itt_log(script))
    assert outline(found) == "outer\n  instant"
    assert {r.domain for r in found} == {"PyTorch"}


ROCTX = """
    import ctypes, sys

    library = ctypes.CDLL(None if sys.argv[1] == "process" else sys.argv[1])
    library.roctxRangeStartA.restype = ctypes.c_uint64
    library.roctxProfilerResume(ctypes.c_uint64(0))
    library.roctxRangePushA(b"outer")
    library.roctxMarkA(b"instant")
    library.roctxRangePop()
    library.roctxRangeStop(ctypes.c_uint64(library.roctxRangeStartA(b"crossing")))
    library.roctxProfilerPause(ctypes.c_uint64(0))
"""


@pytest.mark.parametrize(
    ("how", "opens", "called"),
    [
        ("ld_library_path", "libroctx64.so.4", "libroctx64.so.4"),
        ("ld_library_path", "librocprofiler-sdk-roctx.so.1", "librocprofiler-sdk-roctx.so.1"),
        ("preload", "process", "preload"),
        ("preload", "libroctx64.so.4", "libroctx64.so.4"),
    ],
)
def test_roctx_log_has_the_called_library(how: str, opens: str, called: str) -> None:
    libraries = ("libroctx64.so.4", "librocprofiler-sdk-roctx.so.1")
    events = native.roctx_log(ROCTX, how=how, libraries=libraries, args=[opens])  # type: ignore[arg-type]
    assert {event["library"] for event in events} == {called}
    assert [event["op"] for event in events] == ["resume", "push", "mark", "pop", "start", "end", "pause"]
    assert outline(native.ranges(events)) == "outer\ncrossing"
    assert [mark.name for mark in native.marks(events)] == ["instant"]


@needs_nvtx
def test_calls_of_the_cuda_runtime_are_logged_with_the_ranges() -> None:
    """Calls of the preloaded stand-in succeed and are logged in their order among the ranges."""
    events = native.nvtx_log(
        """
        import ctypes, nvtx
        runtime = ctypes.CDLL(None)
        assert runtime.cudaProfilerStart() == 0
        with nvtx.annotate("between"):
            pass
        assert runtime.cudaProfilerStop() == 0
        """,
        env={"LD_PRELOAD": str(native.build("cudaprofilerlog"))},
    )
    found = [event.get("function") or event.get("message") for event in events if event["op"] in ("call", "push")]
    assert found == ["cudaProfilerStart", "between", "cudaProfilerStop"]


@pytest.mark.nsys
def test_nsys_version() -> None:
    assert nsys.version() >= (2022, 4)


def test_nsys_skips_with_the_cure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(pytest.skip.Exception, match=r"run scripts/install-nsys\.sh"):
        nsys.profile("", tmp_path=tmp_path)


@needs_nvtx
@pytest.mark.nsys
def test_nsys_reports_what_the_log_reports(tmp_path: Path) -> None:
    report = nsys.profile(CALLS, tmp_path=tmp_path)
    assert report.returncode == 0
    check_calls(nsys.ranges(report.file), nsys.marks(report.file))


@needs_nvtx
@pytest.mark.nsys
def test_nsys_passes_the_exit_code_and_the_arguments(tmp_path: Path) -> None:
    report = nsys.profile("import sys; sys.exit(int(sys.argv[1]))", tmp_path=tmp_path, args=["5"], check=False)
    assert report.returncode == 5
    assert nsys.ranges(report.file) == []


@needs_nvtx
@pytest.mark.nsys
def test_nsys_capture_range_records_its_windows_while_the_program_runs(tmp_path: Path) -> None:
    script = f"""{DOMAIN}
    import glob, sys, time

    folder = sys.argv[1]
    for step in range(4):
        lib.push_range(domain.get_event_attributes("capture"), domain.handle)
        lib.push_range(domain.get_event_attributes(f"step {{step}}"), domain.handle)
        lib.pop_range(domain.handle)
        lib.pop_range(domain.handle)
        deadline = time.monotonic() + 60
        while step == 1 and len(glob.glob(folder + "/**/*.nsys-rep", recursive=True)) < 2:
            assert time.monotonic() < deadline, "no reports while the program runs"
            time.sleep(0.05)
    """
    options = ["-c", "nvtx", "-p", "capture@shop", nsys.capture_range_end(2)]
    report = nsys.profile(script, tmp_path=tmp_path, options=options, args=[str(tmp_path)])
    assert [path.name for path in report.files] == ["report.1.nsys-rep", "report.2.nsys-rep"]
    names = [{str(r.name) for r in nsys.ranges(path, balanced=False)} for path in report.files]
    assert ["step 0" in names[0], "step 1" in names[1], "step 2" in names[0] | names[1]] == [
        True,
        True,
        False,
    ]


def _nvtx_queries_the_tool() -> bool:
    """Return whether nvtx queries the tool correctly: 0.2.11 does not, 0.2.12 takes no answer for disabled."""
    from importlib.metadata import version

    return tuple(int(part) for part in version("nvtx").split(".")[:3]) >= (0, 2, 17)
