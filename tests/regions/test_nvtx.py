"""Regions as NVTX ranges, received by a logging tool that replaces Nsight Systems."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import native
from tests.support.programs import environment, program, python, run
from tests.support.ranges import Range, outline

pytestmark = pytest.mark.native

PROGRAM = """
    from instrument import annotate, mark

    @annotate
    def outer():
        inner()

    @annotate("inner", color="green", category="compute", payload=7)
    def inner():
        pass

    @annotate("factorial")
    def factorial(n):
        return 1 if n < 2 else n * factorial(n - 1)

    with annotate("step", color=0x112233, category=3, payload=0.5):
        outer()
        with annotate("fetch", domain="loader", category="disk"):
            assert factorial(3) == 6
        mark("saved", color="#445566", payload=-1)
"""
TREE = """\
step
  outer
    inner
  factorial
    factorial
      factorial
fetch"""
OUTER, FACTORIAL, FETCH = (
    0xFFF28E2B,
    0xFFFF9DA7,
    0xFFFF9DA7,
)  # derived from the name, independent of PYTHONHASHSEED


def attributes(found: list[Range]) -> dict[str | None, tuple[object, ...]]:
    return {r.name: (r.kind, r.domain, r.color, r.category, r.payload) for r in found}


@pytest.mark.parametrize("seed, mode, extension", [
    *((seed, mode, True) for seed, mode in enumerate(native.MODES)), (4, "enabled", False),
])  # fmt: skip
def test_all_kinds_of_tools(seed: int, mode: native.Mode, extension: bool) -> None:
    """Names, nesting, domain, color, category and payload are the same for every kind of tool."""
    events = native.nvtx_log(PROGRAM, mode=mode, extension=extension, env={"PYTHONHASHSEED": str(seed)})
    found = native.ranges(events)
    assert outline(found) == TREE
    assert attributes(found) == {
        "step": ("push_pop", "instrument", 0x112233, 3, 0.5),
        "outer": ("push_pop", "instrument", OUTER, None, None),
        "inner": ("push_pop", "instrument", 0x008000, "compute", 7),
        "factorial": ("push_pop", "instrument", FACTORIAL, None, None),
        "fetch": ("push_pop", "loader", FETCH, "disk", None),
    }
    assert attributes(native.marks(events)) == {"saved": ("mark", "instrument", 0xFF445566, None, -1)}
    # Unregistered strings would be copied on each call, and cannot trigger a capture range.
    assert {True} == {event["registered"] for event in events if event["op"] in ("push", "mark")}
    assert sum(event["op"] == "register" and event["message"] == "factorial" for event in events) == 1


DETAILS = """
    with annotate("", color="red", domain=""):
        pass
    with annotate("x", color=0x102030, domain="", category="", payload=1):
        pass
    for color in ("blue", "yellow", "purple", "rapids", "cyan", "white", "darkgreen", "orange", "green", "red"):
        with annotate(f"in {color}", color=color, domain="d"):
            pass

    @annotate("", color="red", domain="d")
    def f():
        pass

    f()
    mark("", color=1, domain="")
    mark("m", color="darkgreen", domain="d")
    mark(color="red", domain="d")
"""


def test_start_end_ranges_only() -> None:
    """With INSTRUMENT_NVTX_START_END, every range is a start/end range, for tools that filter by thread."""
    found = native.ranges(native.nvtx_log(PROGRAM, env={"INSTRUMENT_NVTX_START_END": "1"}))
    assert {"start_end"} == {r.kind for r in found}
    assert sorted(TREE.split()) == sorted(str(r.name) for r in found)
    outer, inner = ({r.name: r for r in found}[name] for name in ("outer", "inner"))
    assert outer.start <= inner.start <= inner.end <= outer.end
    assert ("start_end", "instrument", 0xFF008000 & 0xFFFFFF, "compute", 7) == attributes(found)["inner"]


def test_details_equal_nvtx() -> None:
    """Empty names and domains, an empty category and named colors arrive as nvtx emits them."""

    def received(names: str) -> list[tuple[object, ...]]:
        events = native.nvtx_log(f"    {names}\n{DETAILS}")
        found = [*native.ranges(events), *native.marks(events)]
        return [
            (r.name or "", r.domain, r.color, r.category, r.payload) for r in found
        ]  # a missing message equals an empty one

    expected = received("from nvtx import annotate, mark")
    assert 16 == len(expected)
    assert expected == received("from instrument import annotate, mark")


def test_numbers_beyond_the_range_of_nvtx() -> None:
    """A payload beyond 64 bits becomes a float, and a category beyond 32 bits a name."""
    events = native.nvtx_log("""
        from instrument import annotate

        with annotate("payload", payload=2**63):
            with annotate("category", category=2**32), annotate("negative", category=-1):
                pass
        with annotate("low", payload=-(10**400)), annotate("after"):
            pass
    """)
    found = native.ranges(events)
    assert outline(found) == "payload\n  category\n    negative\nlow\n  after"
    assert [2.0**63, None, None, float("-inf"), None] == [r.payload for r in found]
    assert [r.category for r in found] == [None, "4294967296", "-1", None, None]


def test_name_that_is_not_utf8() -> None:
    """A file name that Python decoded with surrogates shows with question marks."""
    events = native.nvtx_log("""
        from instrument import annotate

        with annotate("load caf\\udce9.bin", domain="d\\udce9", category="c\\udce9"):
            pass
        with annotate("after"):
            pass
    """)
    found = native.ranges(events)
    assert [(r.name, r.domain, r.category) for r in found] == [
        ("load caf?.bin", "d?", "c?"),
        ("after", "instrument", None),
    ]


def test_instrument_0() -> None:
    """Under INSTRUMENT=0, the tool receives no call at all, not even for a domain."""
    assert native.nvtx_log(PROGRAM, env={"INSTRUMENT": "0"}) == []


def test_nvtx_is_not_imported_without_a_tool(tmp_path: Path) -> None:
    """Without a tool, nvtx is not imported, which would take 80 ms."""
    script = PROGRAM + "\n    import sys; print(*sorted({'nvtx', 'numpy', 'torch', 'ittapi'} & set(sys.modules)))"
    done = run(python(program(script, tmp_path)), environment())
    assert (done.stdout, done.stderr) == ("\n", "")


def test_missing_nvtx(tmp_path: Path) -> None:
    """Without the nvtx package, the program continues, and the log says once what to install."""
    script = "import sys; sys.modules['nvtx'] = None\n" + "\n".join(line[4:] for line in PROGRAM.splitlines())
    env = environment({"NVTX_INJECTION64_PATH": "tool.so"})
    done = run(python(program(script, tmp_path)), env)
    assert len(done.stderr.splitlines()) == 1
    assert "nvtx is missing: pip install nvtx" in done.stderr
