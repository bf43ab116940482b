"""What sampled counters say: families of kernels, energy, a clock that falls, and hostile values."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrument.explain.diagnosis.diagnose import Diagnosis, diagnose
from instrument.explain.metrics.counters import Counters
from instrument.explain.metrics.metrics import metrics
from instrument.read.jobs.read import read_trace
from instrument.read.tables.intervals import covered_ns, integral
from instrument.read.tables.trace import Trace
from instrument.show.sections.diagnosis import overview_section
from instrument.show.terminal.trace_report import gpu_time
from instrument.show.text.diagnosis import lines, to_markdown, value_of

from ..support.shared_traces import shared
from .made_loops import GEMM, STEP, MadeLoop
from .shown import each_step, named
from .small_traces import kernel, on_cpu, trace_of

ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
KERNELS = [(GEMM, ADD)[at % 2] for at in range(20)]
"""Kernels, one after the other: half of them are matmuls."""


def alternating(took_us: int, period_us: int, name: str = "DRAM BW (GB/s)", values: Any = (1000, 3000)) -> Trace:
    """Return kernels of two families that take turns, and a counter that has a value for each of them."""
    end = len(KERNELS) * took_us
    rows = [kernel(each, at * took_us, (at + 1) * took_us) for at, each in enumerate(KERNELS)]
    counted = [
        on_cpu(name, at, at, value=float(values[at // took_us % 2]), device=0) for at in range(0, end, period_us)
    ]
    return trace_of(gpu=[_us(each) for each in rows], counters=[_us(each) for each in counted])


def _us(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"start_ns": row["start_ns"] * 1000, "duration_ns": row["duration_ns"] * 1000}


def families(trace: Trace) -> dict[str, dict[str, Any]]:
    return {row["family"]: row for row in metrics(trace)["counted_families"]}


def test_the_traffic_of_each_family() -> None:
    """Half of the kernels at 1,000 GB/s and half at 3,000 are told apart, to the digit."""
    rows = families(alternating(50, 5))
    assert rows["gemm"]["dram_bytes_per_s"] == pytest.approx(1e12)
    assert rows["elementwise"]["dram_bytes_per_s"] == pytest.approx(3e12)
    assert (rows["gemm"]["dram_ns"], rows["gemm"]["kernel_ns"]) == (500_000, 500_000)
    assert rows["gemm"]["sm_active"] is None


def test_the_mean_of_one_family() -> None:
    """Kernels of one family at two speeds have the mean over their time."""
    rows = [kernel(GEMM, at * 50_000, (at + 1) * 50_000) for at in range(8)]
    counted = [
        on_cpu("HBM Read (%)", at, at, value=20.0 if at < 300_000 else 60.0) for at in range(0, 400_000, 5_000)
    ]
    written = [each | {"name": "HBM Write (%)", "value": 10.0} for each in counted]
    (row,) = metrics(trace_of(gpu=rows, counters=counted + written))["counted_families"]
    assert row["dram_share"] == pytest.approx(0.10 + (0.2 * 3 + 0.6) / 4)  # what is read and what is written
    assert row["dram_bytes_per_s"] is None  # the GPU is not known


def test_a_period_longer_than_the_kernels_says_nothing() -> None:
    """Kernels shorter than the period abstain, and the coverage says so."""
    trace = alternating(50, 60)
    rows = families(trace)
    assert [row["dram_bytes_per_s"] for row in rows.values()] == [None, None]
    assert metrics(trace).about("counted_families").coverage == pytest.approx(0, abs=0.05)
    assert "memory-at-peak" in diagnose(trace).abstained


def test_a_sample_with_idle_time_says_nothing() -> None:
    """A mean over a kernel and the idle time after it is not that of the kernel."""
    rows = [kernel(GEMM, at, at + 50_000) for at in range(0, 1_000_000, 100_000)]
    counted = [on_cpu("SM Active (%)", at, at, value=45.0) for at in range(0, 1_000_000, 100_000)]
    assert families(trace_of(gpu=rows, counters=counted))["gemm"]["sm_active"] is None


def test_a_run_of_short_kernels_counts() -> None:
    """Samples longer than each kernel count where kernels of one family follow each other."""
    rows = [kernel(ADD, at, at + 9_800) for at in range(0, 1_000_000, 10_000)]
    rows += [kernel(GEMM, at, at + 9_800) for at in range(1_000_000, 2_000_000, 10_000)]
    counted = [on_cpu("SM Active (%)", at, at, value=30 + at / 40_000) for at in range(0, 2_000_000, 100_000)]
    found = families(trace_of(gpu=rows, counters=counted))
    assert found["elementwise"]["sm_active"] == pytest.approx((30 + 450 / 40) / 100)
    assert found["gemm"]["sm_active"] == pytest.approx((30 + 1450 / 40) / 100)


def test_work_beside_a_family_hides_it() -> None:
    """A sample with two families at once speaks of neither."""
    trace = alternating(50, 5)
    beside = [kernel(ADD, 0, 20 * 50_000, stream=8)]
    own = [dict(zip(("name", "start_ns", "end_ns"), each, strict=True)) for each in _rows(trace)]
    both = [kernel(each["name"], each["start_ns"], each["end_ns"]) for each in own] + beside
    counted = [
        on_cpu(name, int(at), int(at), value=float(value), device=0)
        for name, at, value in zip(
            trace.counters.text("name"), trace.counters.start_ns, trace.counters.value, strict=True
        )
    ]
    found = families(trace_of(gpu=both, counters=counted))
    assert found["gemm"]["dram_bytes_per_s"] is None
    assert found["elementwise"]["dram_bytes_per_s"] == pytest.approx(3e12)


def _rows(trace: Trace) -> list[tuple[str, int, int]]:
    gpu = trace.gpu
    return list(zip(gpu.text("name"), gpu.start_ns.tolist(), gpu.end_ns.tolist(), strict=True))


@given(
    edges=st.lists(st.integers(0, 40), min_size=2, max_size=12, unique=True).map(sorted),
    level=st.lists(st.integers(-5, 5), min_size=11, max_size=11),
    asked=st.lists(st.tuples(st.integers(-3, 45), st.integers(0, 20)), max_size=5),
)
def test_integrals(edges: list[int], level: list[int], asked: list[tuple[int, int]]) -> None:
    """The integral of a step function is the sum of its value at each nanosecond, as is its coverage."""
    starts, ends = np.array(edges[:-1:2][: len(edges) // 2]), np.array(edges[1::2])
    values = np.array(level[: len(starts)])
    at = {
        time: value for start, end, value in zip(starts, ends, values, strict=True) for time in range(start, end)
    }
    begin = np.array([first for first, _ in asked], np.int64)
    end = begin + np.array([length for _, length in asked], np.int64)
    spans = [range(first, last) for first, last in zip(begin, end, strict=True)]
    assert integral((starts, ends), values, begin, end).tolist() == [
        sum(at.get(time, 0) for time in span) for span in spans
    ]
    assert covered_ns((starts, ends), begin, end).tolist() == [sum(time in at for time in span) for span in spans]


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 1e4)), min_size=1, max_size=20),
    st.integers(0, 900),
    st.integers(1, 300),
)
def test_a_mean_is_between_the_samples(samples: list[tuple[int, float]], start: int, took: int) -> None:
    """A mean over any time is from the least sample to the greatest, and of no more time."""
    rows = [on_cpu("Power (W)", at, at, value=value) for at, value in samples]
    (counter,) = Counters(trace_of(counters=rows)).all
    mean, known_ns = counter.mean((np.array([start]), np.array([start + took])))
    assert 0 <= known_ns <= took
    assert (mean is None) == (known_ns == 0)
    if mean is not None:
        values = [value for _, value in samples]
        assert min(values) - 1e-6 <= mean <= max(values) + 1e-6


def powered(loop: MadeLoop, *, until: int = 3 * STEP) -> Trace:
    for at in range(0, until, 10):
        loop.counter("Power (W)", at, 400 if at < STEP else 700)
    return loop.trace()


def test_energy() -> None:
    """The energy of a step is the mean power times its length."""
    numbers = metrics(powered(MadeLoop()))
    assert numbers["energy"]["watts"] == pytest.approx(600)
    assert numbers["energy"]["joules_per_step"] == pytest.approx(600 * STEP * 1e-6)
    assert numbers["energy"]["joules"] == pytest.approx(3 * 600 * STEP * 1e-6)
    assert numbers.about("energy").coverage == pytest.approx(1)
    assert numbers.about("energy").unit == "J"


@pytest.mark.parametrize(("told", "joules"), [("16", 600 * STEP * 1e-6 / 16), ("0", None), ("many", None)])
def test_energy_of_a_sample(told: str, joules: float | None) -> None:
    """It follows from the samples that the program takes in a step, where the trace has their number."""
    trace = replace(powered(MadeLoop()), metadata={"instrument_samples": told})
    assert metrics(trace)["energy"]["joules_per_sample"] == (joules and pytest.approx(joules))


def test_energy_of_half_of_the_window() -> None:
    """Where the power is known for half of the window only, the energy is not, and the coverage says so."""
    numbers = metrics(powered(MadeLoop(), until=1500))
    energy = {"watts": pytest.approx(500), "joules": None, "joules_per_step": None, "joules_per_sample": None}
    assert numbers["energy"] == energy
    assert numbers.about("energy").coverage == pytest.approx(0.5, abs=0.01)


def test_a_gap_between_samples_is_not_known() -> None:
    """A value holds for one and a half periods at most."""
    rows = [on_cpu("Power (W)", at, at, value=500.0) for at in (0, 10, 20, 30, 100, 110)]
    (counter,) = Counters(trace_of(counters=rows)).all
    assert counter.mean((np.array([0]), np.array([200]))) == (500, 45 + 20)
    assert counter.mean((np.array([50]), np.array([100]))) == (None, 0)


def clocked(clock: Any, loop: MadeLoop | None = None) -> Diagnosis:
    """Return the diagnosis of three steps with a clock that is a function of the time in us."""
    loop = loop or MadeLoop()
    for at in range(0, 3 * STEP, 10):
        loop.counter("SM Clock (MHz)", at, clock(at))
    return diagnose(loop.trace())


def test_a_clock_that_falls() -> None:
    """A clock that falls by a third in the last step costs a third of that step's kernels."""
    found = named(clocked(lambda at: 1320 if at >= 2 * STEP else 1980))["throttled-clock"]
    assert found.title == "The clock falls from 1,980 to 1,320 MHz while kernels run"
    assert found.win_ns == pytest.approx(999_000 / 3 / 3, rel=0.02)
    assert found.fix is not None
    assert "nvidia-smi -q -d PERFORMANCE" in found.fix.text


@pytest.mark.parametrize(
    "clock",
    [
        pytest.param(lambda at: 1980, id="constant"),
        pytest.param(lambda at: 900 if at < 300 else 1980, id="a GPU that wakes up"),
        pytest.param(lambda at: 1980 - at % 30, id="a clock that wavers by 2 %"),
        pytest.param(lambda at: 2100 if at < 100 else 1980, id="a short boost"),
    ],
)
def test_no_fall(clock: Any) -> None:
    """A clock that rises, wavers or was higher for a moment does not fall."""
    diagnosis = clocked(clock)
    assert "throttled-clock" not in named(diagnosis)
    assert "throttled-clock" not in diagnosis.abstained


def test_an_idle_gpu_may_lower_its_clock() -> None:
    """A clock that is low only while the GPU idles does not count."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        loop.work(GEMM, start, start + 1, start + 500)
    assert "throttled-clock" not in named(clocked(lambda at: 1980 if at % STEP < 510 else 300, loop))


@pytest.mark.parametrize(
    ("burst", "period", "offset"), [(500, 300, 0), (500, 300, 50), (700, 1100, 0), (900, 130, 0)]
)
def test_a_clock_that_is_low_between_kernels(burst: int, period: int, offset: int) -> None:
    """Kernels of one clock: what is sampled in the pauses between them does not count, however long it holds."""
    loop = MadeLoop(steps=30, busy=False)
    for start in each_step(30):
        loop.work(GEMM, start + 5, start + 6, start + burst)
    for at in range(offset, 30 * STEP, period):
        loop.counter("SM Clock (MHz)", at, 1980 if 6 <= at % STEP < burst else 345)
    assert "throttled-clock" not in named(diagnose(loop.trace()))


def test_a_clock_that_was_sampled_rarely() -> None:
    """A rule abstains if there are too few samples."""
    loop = MadeLoop()
    for at in (0, 1500, 2900):
        loop.counter("SM Clock (MHz)", at, 1980 - at / 3)
    assert "less than 5 times" in diagnose(loop.trace()).abstained["throttled-clock"]


def test_heat_and_power_are_said() -> None:
    """The finding says that the power was at its highest, and how much warmer the GPU was."""
    loop = MadeLoop()
    for at in range(0, 3 * STEP, 10):
        loop.counter("Power (W)", at, 600 if at < 500 else 696).counter("Power Limit (W)", at, 900)
        loop.counter("Temperature (C)", at, 60 if at < STEP else 88).counter("GPU Temperature Limit (C)", at, 90)
    found = named(clocked(lambda at: 1980 if at < STEP else 1320, loop))["throttled-clock"]
    assert found.title.endswith(", with the power at its highest (696 W) and 88 C after 60 C")
    values = {each.name: value_of(each) for each in found.evidence}
    assert (values["power_w"], values["temperature_c"]) == ("696 W", "88 C")
    assert (values["held_mhz"], values["low_mhz"]) == ("1,980 MHz", "1,320 MHz")


@pytest.mark.parametrize(
    ("limit", "said"), [(None, ""), (900, ""), (700, ", with the power at its limit (696 of 700 W)")]
)
def test_constant_power_is_at_its_highest_only_at_a_limit(limit: float | None, said: str) -> None:
    """Power that was never lower while the GPU worked explains nothing, but where it reaches a sampled limit."""
    loop = MadeLoop()
    for at in range(0, 4 * STEP, 10):
        loop.counter("Power (W)", at, 696 if at < 3 * STEP else 90).counter("Power Min Limit (W)", at, 200)
        if limit is not None:
            loop.counter("GPU Power Limit (W)", at, limit)
    found = named(clocked(lambda at: 1980 if at < STEP else 1320, loop))["throttled-clock"]
    assert found.title == f"The clock falls from 1,980 to 1,320 MHz while kernels run{said}"


@pytest.mark.parametrize(
    ("kind", "name", "bounds"),
    [
        ("power", "Power Draw (W)", ["Power Cap (W)", "Power: default limit (W)", "GPU Power Limit Enforced (W)"]),
        ("clock", "SM Clock (MHz)", ["SM Clock Max (MHz)", "SM Clock Limit (MHz)", "SM Clock (target) (MHz)"]),
        (
            "temperature",
            "Temperature (C)",
            ["GPU Temperature Limit (C)", "GPU Temperature Slowdown Threshold (C)"],
        ),
    ],
)
def test_bounds_are_no_values(kind: str, name: str, bounds: list[str]) -> None:
    """What a value may be at most, or shall be, is not taken for it."""
    loop = MadeLoop()
    for at in range(0, 100, 10):
        for each in (name, *bounds):
            loop.counter(each, at, at)
    assert [each.name for each in Counters(loop.trace()).of(kind, 0)] == [name]


def test_the_stacks_of_a_memory_add_up() -> None:
    """The traffic of the memory is that of all of its stacks, unless it was sampled as well."""
    loop = MadeLoop()
    for at in range(0, 3 * STEP, 10):
        for stack in range(4):
            loop.counter(f"HBM {stack} BW (GB/s)", at, 700)
    (row,) = metrics(loop.trace())["counted_families"]
    assert row["dram_bytes_per_s"] == pytest.approx(2.8e12)
    for at in range(0, 3 * STEP, 10):
        loop.counter("HBM BW (GB/s)", at, 2000)
    (row,) = metrics(loop.trace())["counted_families"]
    assert row["dram_bytes_per_s"] == pytest.approx(2e12)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DRAM BW (GiB/s)", 2.0**30),
        ("DRAM BW (MiB/s)", 2.0**20),
        ("DRAM BW [kB/s]", 1e3),
        ("SM Clock (KHz)", 1e3),
        ("SM Clock: kHz", 1e3),
        ("Power (mW)", 1e-3),
    ],
)
def test_every_unit_that_is_read_is_judged(name: str, value: float) -> None:
    """A counter has its value in SI units."""
    loop = MadeLoop().counter(name, 0, 1).counter(name, 10, 1)
    kind = {"D": "dram_rate", "S": "clock", "P": "power"}[name[0]]
    (counter,) = Counters(loop.trace()).of(kind, 0)
    assert counter.values.tolist() == [value, value]


def test_the_gpu_whose_clock_falls() -> None:
    """Of two GPUs, the one with the lower clock is named."""
    loop = MadeLoop()
    for start in each_step():
        loop.work(GEMM, start, start + 1, start + STEP, device=1)
    for at in range(0, 3 * STEP, 10):
        loop.counter("SM Clock (MHz)", at, 1980).counter(
            "SM Clock (MHz)", at, 1980 if at < STEP else 990, device=1
        )
    assert "The clock of GPU 1 falls" in named(diagnose(loop.trace()))["throttled-clock"].title


@pytest.mark.parametrize(("active", "found"), [(40, True), (99, False)])
def test_sampled_activity_replaces_the_estimate(active: float, *, found: bool) -> None:
    """Kernels with a quarter of the blocks are judged by the samples of their family."""
    loop = MadeLoop(busy=False)
    for start in each_step():
        for at in range(start, start + STEP, 100):
            loop.work("k", at - 1, at, at + 100, blocks=33, block_threads=128)
    assert "0.25 blocks" in named(diagnose(loop.trace()))["low-sm-efficiency"].title
    for at in range(0, 3 * STEP, 10):
        loop.counter("SM Active (%)", at, active)
    diagnosis = named(diagnose(loop.trace()))
    assert ("low-sm-efficiency" in diagnosis) == found
    if found:
        assert "40 % have work" in diagnosis["low-sm-efficiency"].title
        assert diagnosis["low-sm-efficiency"].win_ns == pytest.approx(0.6 * STEP * 1000, rel=0.02)


def test_power_clock_and_heat_are_shown() -> None:
    """The terminal, Markdown, the page and the summary have them in one sentence, if there are samples."""
    loop = MadeLoop()
    for at in range(0, 3 * STEP, 10):
        loop.counter("Power (W)", at, 650 if at < 1.5 * STEP else 700).counter("Temperature (C)", at, 61)
    diagnosis = clocked(lambda at: 1980, loop)
    text = "Power 675 W (650 to 700), 0.675 J a step; SM clock 1,980 MHz; Temperature 61 C."
    assert text in ["".join(part for part, _ in row) for row in lines(diagnosis, 200)]
    assert text in to_markdown(diagnosis)
    assert text in (overview_section(diagnosis) or {})["notes"]
    assert diagnosis.facts is not None
    assert text in [*gpu_time(diagnosis.facts)]
    assert not diagnose(MadeLoop().trace()).counters_text


VALUES: list[Any] = [float("nan"), "600", None, [1], {}, True, 1e308, -1e308, 10**400, -5, 2**63]


def test_hostile_counters(tmp_path: Path) -> None:
    """Values that are no numbers are left out; times out of order, resets and names alike do no harm."""
    listed: list[dict[str, Any]] = [
        {"ph": "X", "cat": "kernel", "name": GEMM, "ts": 100 * at, "dur": 99, "pid": 0, "tid": 7, "args": args}
        for at in range(10)
        for args in ({"device": 0, "stream": 7},)
    ]
    for at in range(40):
        for name in ("Power (W)", "SM Clock (MHz)", "DRAM BW (%)", "SM Active (%)", "Temperature (C)", "x" * 5000):
            value = VALUES[at % len(VALUES)] if at % 3 else 50
            place = {"ph": "C", "name": name, "ts": (at * 7919) % 1000, "pid": f"GPU {at % 2} Counters"}
            listed += [place | {"args": {"": value, "other": at}}, place | {"args": None}, place | {"args": []}]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": listed}))
    trace = read_trace(path)
    assert np.isfinite(trace.counters.value).all()
    assert {"Power (W)", "Power (W): other"} <= {*trace.counters.text("name")}
    assert {*trace.counters.device.tolist()} == {0, 1}
    assert not diagnose(trace).failed
    for row in metrics(trace)["counter_table"]:
        assert all(value is None or value == value for value in row.values() if isinstance(value, float))
    json.dumps(metrics(trace), allow_nan=False)


def test_unknown_counters_are_shown() -> None:
    """A counter that no rule knows has its name, its unit and its mean."""
    loop = MadeLoop()
    for at in range(10):
        loop.counter("NVLink RX [MB/s]", at, at)
    (row,) = metrics(loop.trace())["counter_table"]
    assert (row["name"], row["unit"], row["mean"], row["max"]) == ("NVLink RX [MB/s]", "MB/s", 4.5, 9)
    assert row["period_ns"] == 1000


def test_counters_without_a_device_are_those_of_the_only_gpu() -> None:
    """If the file does not name a device, and has one GPU, the counters are its own."""
    loop = MadeLoop()
    for at in range(0, 3 * STEP, 10):
        loop.counter("Power (W)", at, 100, device=-1)
    assert metrics(loop.trace())["energy"]["watts"] == pytest.approx(100)


def test_a_real_trace() -> None:
    """HBM traffic that torch_npu samples every 20 ms speaks of the collectives alone, which last longer."""
    rows = families(read_trace(shared("npu/ascend_level1_rank0_trace_view.json")))
    known = {family: row for family, row in rows.items() if row["dram_bytes_per_s"] is not None}
    assert [*known] == ["collective"]
    assert 0 < known["collective"]["dram_bytes_per_s"] < 1e12
    assert known["collective"]["dram_ns"] < known["collective"]["kernel_ns"]
