"""The table of settings, and how they are changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import simgpu
from tests.simgpu.programs import run
from tests.simgpu.settings import BY_NAME, SETTINGS

pytestmark = pytest.mark.gpu_sim

needs_gpu = pytest.mark.skipif(not simgpu.active(), reason="needs the simulated GPU: make gpu-sim")


def test_the_table_has_the_names_and_defaults_of_the_libraries() -> None:
    text = (Path(__file__).parent / "native/settings.cpp").read_text()
    pairs = dict(re.findall(r'\{"([A-Z_]+)", "([^"]*)"\}', text))

    assert pairs == {setting.name: setting.default for setting in SETTINGS}


def test_each_default_is_accepted() -> None:
    assert [setting.text(setting.default) for setting in SETTINGS] == [setting.default for setting in SETTINGS]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("kernel_ns", -1, '"kernel_ns" must be a whole number from 0, of at most 18 digits: -1'),
        ("cupti", "gone", '"cupti" must be "" or "refused" or "busy": \'gone\''),
        ("lost_records", 2, '"lost_records" must be 0 or 1: 2'),
        ("durations", "gemm", '"durations" must be PART=NS,... or a dict {"gemm": 100_000}: \'gemm\''),
        ("devices", 2, '"devices" is read when a process starts: set SIMGPU_DEVICES=2'),
        ("kernels", 1, '"kernels" is none of the settings: '),
    ],
)
def test_an_error_names_the_setting_the_value_and_what_is_accepted(name: str, value: int | str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        simgpu.configure(**{name: value})

    assert str(caught.value).startswith(said)


@needs_gpu
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cupti": "gone"}, '"cupti" must be "" or "refused" or "busy": \'gone\''),
        ({"hangs": "x"}, "SIMGPU_HANGS is none of the settings: "),
        ({"numerics": "abc"}, "\"numerics\" must be 0 or 1: 'abc'"),
        ({"queue": 0}, '"queue" must be a whole number from 1'),
        ({"slow": "0=1.2.3"}, '"slow" must be DEVICE=FACTOR'),
        ({"log": "/nowhere/x"}, "SIMGPU_LOG must be a path in a folder that exists: '/nowhere/x'"),
    ],
)
def test_a_process_ends_where_its_environment_has_what_is_not_accepted(
    settings: dict[str, str], said: str
) -> None:
    done = run("print('runs')", **settings)

    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr


@needs_gpu
def test_a_block_gets_its_settings_and_leaves_those_from_before() -> None:
    before = {name: simgpu.value_of(name) for name in BY_NAME}

    with simgpu.configured(durations={"gemm": 7, "reduce": 9}, slow={1: 2.5}, gemm_shapes=True, cupti="busy"):
        inside = [simgpu.value_of(name) for name in ("durations", "slow", "gemm_shapes", "cupti")]

    assert inside == ["gemm=7,reduce=9", "1=2.5", "1", "busy"]
    assert {name: simgpu.value_of(name) for name in BY_NAME} == before


@needs_gpu
def test_nothing_changes_where_one_of_several_is_wrong() -> None:
    before = simgpu.value_of("kernel_ns")

    with pytest.raises(ValueError):
        simgpu.configure(kernel_ns=1, cupti="gone")

    assert simgpu.value_of("kernel_ns") == before
