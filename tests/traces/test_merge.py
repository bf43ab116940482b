"""`merge_traces`: one trace of several ranks, with their own processes and ids, on one clock."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import instrument
from instrument.base.errors import TraceError
from instrument.explain.slimming.slim import slim
from instrument.read.jobs import merge
from instrument.read.jobs.merge import MergedTrace, merge_traces
from instrument.read.kineto.insert_events import add_gpu_lanes
from instrument.start.cli import app
from tests.support import warm
from tests.support.kineto_text import Event, dumps, events
from tests.support.shared_traces import shared

ROOT = Path(__file__).parents[2]
IDS = ("correlation", "External id", "external id", "wait_on_cuda_event_record_corr_id")


def event(category: str, name: str, at: float, duration: int, pid: Any = 7, tid: Any = 7, **args: Any) -> Event:
    times = {"ts": at, "dur": duration}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times, "args": args}


def name(kind: str, pid: Any, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": 0, "args": args}


def rank_events(at: int = 0, steps: range = range(3, 5)) -> list[Event]:
    """Return the events of a process with one GPU, in each step of 1000 us a matmul and an all-reduce."""
    made = [
        name("process_name", 7, name="python"),
        name("process_labels", 7, labels="CPU"),
        name("process_sort_index", 7, sort_index=7),
        name("process_name", 0, name="python"),
        name("process_labels", 0, labels="GPU 0"),
        name("process_sort_index", 0, sort_index=5_000_000),
        name("process_labels", 1, labels="GPU 1"),
        name("thread_name", 1, name="stream 9"),
        name("thread_name", 0, name="stream 5"),
    ]
    for place, step in enumerate(steps):
        begin, ids = at + 1000 * place, {"correlation": 2 * place + 1, "External id": 2 * place + 1}
        gpu = {"device": 0, "stream": 5, "pid": 0, "tid": 5}
        made += [
            event("user_annotation", f"ProfilerStep#{step}", begin, 900),
            event("cpu_op", "aten::mm", begin + 10, 80, **{"External id": ids["External id"]}),
            event("cuda_runtime", "cudaLaunchKernel", begin + 20, 5, **ids),
            event("cuda_runtime", "cudaLaunchKernel", begin + 50, 5, correlation=2 * place + 2),
            {"ph": "s", "id": 2 * place + 1, "pid": 7, "tid": 7, "ts": begin + 20, "cat": "ac2g", "name": "ac2g"},
            {"ph": "f", "id": 2 * place + 1, "pid": 0, "tid": 5, "ts": begin + 40, "cat": "ac2g", "name": "ac2g"},
            event("kernel", "gemm", begin + 40, 60, **gpu, **ids),
            event("kernel", "ncclDevKernel_AllReduce", begin + 150, 800, **gpu, correlation=2 * place + 2),
            event("gpu_user_annotation", "forward", begin + 40, 60, pid=0, tid=5),
        ]
    return made


def write(path: Path, content: list[Event], rank: int | None = None, world_size: int = 2, **more: Any) -> Path:
    about = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": world_size}}
    path.parent.mkdir(parents=True, exist_ok=True)
    gpu = {"id": 0, "name": "H100", "numSms": 132}
    text = dumps({"schemaVersion": 1, "deviceProperties": [gpu], **about, **more, "traceEvents": content})
    path.write_text(text)
    return path


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return a folder with the traces of two ranks of two steps; the clock of rank 1 is 5 ms and 250 ns late."""
    write(tmp_path / "job" / "rank0.json", rank_events(), 0)
    early = [one | ({"ts": one["ts"] - Decimal("5000.25")} if "ts" in one else {}) for one in rank_events()]
    write(tmp_path / "job" / "rank1.json", early, 1)
    return tmp_path / "job"


def loaded(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    text = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    content: dict[str, Any] = json.loads(text, parse_float=Decimal)
    return content


def own(merged: MergedTrace) -> dict[int, list[Event]]:
    """Return the events of each rank with their own processes and ids and on their own clocks, without names."""
    content = loaded(merged.path)
    about = content["instrument_merge"]["ranks"]
    places = {
        int(new): (int(rank), before) for rank, note in about.items() for new, before in note["processes"].items()
    }
    digits = len(str(max(merged.files)))
    found = defaultdict(list)
    for one in content["traceEvents"]:
        if one["ph"] != "M":
            rank, process = places[one["pid"]]
            one["pid"] = process
            one["ts"] -= Decimal(merged.clocks[rank].offset_ns) / 1000
            shortened(one, digits, f"{rank:0{digits}}")
            found[rank].append(one)
    return found


def shortened(one: Event, digits: int, rank: str) -> None:
    """Remove the digits of the rank from the ids of an event."""
    args = one.get("args")
    for holder, key in [(one, "id"), *((args, key) for key in IDS if isinstance(args, dict))]:
        value = holder.get(key)
        if type(value) is int and value > 0:
            assert str(value).endswith(rank)
            holder[key] = int(str(value)[:-digits])


def comparable(content: list[Event]) -> Counter[str]:
    def exact(value: Decimal) -> str:
        return f"{value.normalize():f}"

    known = ({"pid": ""} | one | {"ts": exact(Decimal(one["ts"]))} for one in content if one["ph"] != "M")
    return Counter(json.dumps(one, sort_keys=True, default=exact) for one in known)


def names_of(path: Path) -> list[str]:
    """Return the names of the processes in the order in which a viewer shows them."""
    found: dict[int, dict[str, Any]] = defaultdict(dict)
    for one in loaded(path)["traceEvents"]:
        if one["ph"] == "M" and one["name"].startswith("process_"):
            found[one["pid"]] |= one["args"]
    return [about["name"] for about in sorted(found.values(), key=lambda about: about["sort_index"])]


RANK = st.tuples(
    events(phases="XXXXiCMsf").filter(bool),
    st.one_of(st.just(0), st.integers(1_700_000_000_000_000_000, 1_700_000_000_000_009_999)),
)


@settings(max_examples=100, deadline=None)
@given(ranks=st.lists(RANK, min_size=1, max_size=3), seed=st.integers(0, 2**40))
def test_the_events_are_those_of_the_ranks(
    tmp_path_factory: pytest.TempPathFactory, ranks: list[tuple[list[Event], int]], seed: int
) -> None:
    """Whatever the events: without offset, and with their own processes and ids, they are those of the files."""
    folder = tmp_path_factory.mktemp("ranks")
    numbers = [9 * place for place in range(len(ranks))]
    for rank, (content, epoch_ns) in zip(numbers, ranks, strict=True):
        for one in content:
            if one["ph"] in "sf":
                one["id"] = seed
        write(folder / f"rank{rank}.json", content, rank, baseTimeNanoseconds=epoch_ns)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "instrument.read.jobs.ranks.usable_cores", lambda: 1
        )  # processes would take most of the time
        merged = merge_traces(folder, folder / "all.json")
    found = own(merged)
    for rank in numbers:
        expected = loaded(folder / f"rank{rank}.json")["traceEvents"]
        assert comparable(found[rank]) == comparable(expected)
    assert merged.events == sum(map(len, found.values()))
    assert ["reference"] == [clock.source for clock in merged.clocks.values()][:1]


def test_eight_real_ranks(tmp_path: Path) -> None:
    """Of eight ranks of a real job, all events stay, exactly, and links and steps are those of the files."""
    paths = [shared(f"param_dlrm_8rank_r{rank}.json.gz") for rank in range(8)]
    merged = merge_traces(paths, tmp_path / "all.json.gz")
    found, alone = own(merged), instrument.read_traces(paths)
    assert dict(merged.clocks) == alone.clocks
    assert {clock.source for clock in merged.clocks.values()} == {"reference", "collectives"}
    whole = instrument.read_trace(merged.path)
    for rank, trace in alone.items():
        assert comparable(found[rank]) == comparable(loaded(paths[rank])["traceEvents"])
        gpu = whole.gpu.where(whole.gpu.device == rank)
        assert np.array_equal(gpu.start_ns - merged.clocks[rank].offset_ns, trace.gpu.start_ns)
        assert np.array_equal(gpu.duration_ns, trace.gpu.duration_ns)
        for link in ("launch", "operator", "region", "step"):
            assert np.array_equal(gpu[link] >= 0, trace.gpu[link] >= 0)
        launches = whole.runtime.start_ns[gpu.launch[gpu.launch >= 0]] - merged.clocks[rank].offset_ns
        expected = trace.runtime.start_ns[trace.gpu.launch[trace.gpu.launch >= 0]]
        assert np.array_equal(launches, expected)


def test_ranks_stand_in_order(job: Path) -> None:
    """A viewer shows each process under the name of its rank, CPU before GPU, and no GPU without events."""
    merged = merge_traces(job)
    assert merged.path == job.parent / "job.merged.json.gz"
    assert names_of(merged.path) == ["rank 0: python", "rank 0: GPU 0", "rank 1: python", "rank 1: GPU 0"]
    content = loaded(merged.path)
    threads = [one for one in content["traceEvents"] if one["name"] == "thread_name"]
    assert [one["args"]["name"] for one in threads] == ["stream 5", "stream 5"]
    assert content["displayTimeUnit"] == "ms"
    about = content["instrument_merge"]["ranks"]
    assert [note["metadata"]["distributedInfo"]["rank"] for note in about.values()] == [0, 1]
    assert about["1"]["clock"]["offset_ns"] == 5_000_250
    assert about["1"]["file"] == "rank1.json"


def test_arrows_stay_in_their_rank(job: Path) -> None:
    """Each flow has one begin and one end, in one rank, although the files have the same ids."""
    merged = merge_traces(job)
    flows = defaultdict(list)
    for one in loaded(merged.path)["traceEvents"]:
        if one["ph"] in "sf":
            flows[one["id"]].append(one)
    assert len(flows) == 4
    assert {tuple(one["ph"] for one in pair) for pair in flows.values()} == {("s", "f")}
    about = loaded(merged.path)["instrument_merge"]["ranks"]
    of_ranks = [set(map(int, note["processes"])) for note in about.values()]
    for begin, end in flows.values():
        assert sum({begin["pid"], end["pid"]} <= processes for processes in of_ranks) == 1


def test_one_clock(job: Path) -> None:
    """By common collectives, events that happened together are shown together."""
    merged = merge_traces(job)
    assert merged.clocks[1].source == "collectives"
    assert merged.clocks[1].offset_ns == 5_000_250
    trace = instrument.read_trace(merged.path)
    ends = trace.gpu.end_ns[trace.gpu.matching("name", re.compile("ncclDevKernel"))]
    assert ends.tolist() == [950_000, 950_000, 1_950_000, 1_950_000]


def test_the_clocks_of_the_machines(tmp_path: Path) -> None:
    """Without common collectives, the epochs of the files decide, and the command says so."""
    for rank, epoch_ns in enumerate((1_700_000_000_000_000_000, 1_700_000_000_000_002_500)):
        content = [event("cpu_op", "aten::mm", 10, 5), event("user_annotation", "ProfilerStep#3", 5, 50)]
        write(tmp_path / f"rank{rank}.json", content, rank, baseTimeNanoseconds=epoch_ns)
    out = tmp_path / "all.json"
    result = CliRunner().invoke(app, ["merge", str(tmp_path), "--out", str(out)])
    assert result.exit_code == 0
    assert "clocks of their machines" in " ".join(result.stdout.split())
    trace = instrument.read_trace(out)
    assert trace.epoch_ns == 1_700_000_000_000_000_000
    assert trace.operators.start_ns.tolist() == [10_000, 12_500]


@pytest.mark.parametrize("damaged", [17, None, 2**70, 1_600_000_000_000_000_000])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_clock(tmp_path: Path, damaged: int | None, rank: int) -> None:
    """A rank is not shifted by years: torch's times of all ranks count from the same moment; nothing is sure."""
    for each in range(2):
        epoch_ns = damaged if each == rank else 1_700_000_000_000_000_000
        more = {} if epoch_ns is None else {"baseTimeNanoseconds": epoch_ns}
        content = [event("cpu_op", "aten::mm", 10 + each, 5), event("user_annotation", "ProfilerStep#3", 5, 50)]
        write(tmp_path / f"rank{each}.json", content, each, **more)
    out = tmp_path / "all.json"
    result = CliRunner().invoke(app, ["merge", str(tmp_path), "--out", str(out)])
    assert "is missing or impossible" in " ".join(result.stdout.split())
    assert [10_000, 11_000] == instrument.read_trace(out).operators.start_ns.tolist()
    assert "unknown" == merge_traces(tmp_path, out).clocks[1].source


def test_clocks_of_which_nothing_is_known(tmp_path: Path) -> None:
    """Where the times themselves lie years apart, the first steps begin together."""
    for rank, at in enumerate((0, 1_700_000_000_000_000)):
        content = [event("user_annotation", "ProfilerStep#3", at + 7, 50)]
        write(tmp_path / f"rank{rank}.json", content, rank)
    merged = merge_traces(tmp_path, tmp_path / "all.json")
    assert "unknown" == merged.clocks[1].source
    assert [7_000, 7_000] == instrument.read_trace(merged.path).steps.start_ns.tolist()


def test_ranks_of_one_machine(tmp_path: Path) -> None:
    """They share a clock, so that nothing warns of it."""
    for rank in range(2):
        content = [event("user_annotation", "ProfilerStep#3", 5 + rank, 50)]
        about = {"baseTimeNanoseconds": 1_700_000_000_000_000_000, "instrument_machine": "1234"}
        write(tmp_path / f"rank{rank}.json", content, rank, **about)
    result = CliRunner().invoke(app, ["merge", str(tmp_path), "--out", str(tmp_path / "all.json")])
    assert "clocks of their machines" not in " ".join(result.stdout.split())
    assert "machine" == instrument.read_traces(tmp_path).clocks[1].source


@pytest.mark.parametrize("content", ["null", "[]", "{}", ' {"traceEvents": []}', ""])
def test_a_file_that_lost_its_content(job: Path, content: str) -> None:
    """A file with the name of a rank and no event is named; files of other content beside it are no traces."""
    (job / "rank1.json").write_text(content)
    (job / "rank0.black_box.json").write_text('{"step": 3}')
    with pytest.raises(TraceError, match=r"rank1.json.*skip_unreadable=True merges the other ranks"):
        merge_traces(job)
    merged = merge_traces(job, skip_unreadable=True)
    assert ([0], [job / "rank1.json"]) == (list(merged.files), list(merged.failed))


def test_impossible_times(job: Path) -> None:
    """An event whose time is beyond any trace is left out, and the reason says so."""
    content = loaded(job / "rank1.json")
    content["traceEvents"].append(event("cpu_op", "late", 10**18, 5))
    (job / "rank1.json").write_text(dumps(content))
    merged = merge_traces(job)
    assert ["an event with an impossible time"] == list(merged.damaged[1].reasons)
    assert 1 == merged.damaged[1].events


def test_a_merged_trace_is_read_as_one(job: Path) -> None:
    """It has several processes and GPUs, numbered in order of the ranks, and no rank; the files stay the job."""
    merged = merge_traces(job, job / "all.json.gz")
    trace, alone = instrument.read_trace(merged.path), instrument.read_traces(job)
    assert (trace.rank, trace.world_size) == (None, None)
    assert sorted(set(trace.gpu.device.tolist())) == [0, 1]
    assert trace.gpu_regions.device.tolist() == [0, 1, 0, 1]
    assert [(device.id, device.sms) for device in trace.devices] == [(0, 132), (1, 132)]
    assert trace.coverage["launch"].linked == len(trace.gpu) == 8
    assert len(trace.steps) == 4
    for rank in (0, 1):
        launches = trace.gpu.launch[trace.gpu.device == rank]
        assert {trace.threads[thread].process for thread in trace.runtime.thread[launches]} == {1000 + 2 * rank}
    assert alone.ranks == [0, 1]
    assert alone.left_out == {merged.path: "it is a merged trace"}
    assert len(instrument.metrics(trace)["per_gpu"]) == 2


def test_a_diagnosis_of_a_merged_trace(job: Path) -> None:
    """It says that times are sums over the ranks, and how to get those of the job."""
    found = instrument.diagnose(merge_traces(job).path)
    assert (0, 1) == found.merged_ranks
    assert "A merged trace of 2 ranks: their times add up. To diagnose the job, give the folder of" in " ".join(
        str(found).split()
    )
    assert [0, 1] == json.loads(found.to_json())["merged_ranks"]
    assert () == instrument.diagnose(job).merged_ranks


def test_a_merged_trace_among_the_files(job: Path) -> None:
    """It is left out when the folder is merged again, and does not hide the folders of ranks."""
    merged = merge_traces(job, job / "all.json.gz")
    assert {merged.path: "it is a merged trace"} == merge_traces(job, job / "all.json.gz").left_out
    folder = job.parent / "run"
    folder.mkdir()
    job.rename(folder / "window-0001")
    (folder / "window-0001" / "all.json.gz").rename(folder / "all.json.gz")
    assert [0, 1] == instrument.read_traces(folder).ranks


def test_what_the_files_of_ranks_say(tmp_path: Path) -> None:
    """A merged trace keeps which steps ran, and which lanes of slim traces belong to one thread."""
    for rank in range(2):
        content = [*rank_events(), event("user_annotation", "ProfilerStep#5", 2000, 10)]
        content.append(event("cpu_op", "overlapping", 15, 80, tid=99))
        more = {"instrument_steps": "3-4", "instrument_slim": {"lanes": [[7, 99, 7], [1], 5]}}
        write(tmp_path / f"rank{rank}.json", content, rank, **more)
    trace = instrument.read_trace(merge_traces(tmp_path, tmp_path / "all.json").path)
    assert trace.steps.number.tolist() == [3, 3, 4, 4]
    assert {trace.threads[thread].thread for thread in trace.operators.thread} == {7}
    assert instrument.read_traces(tmp_path)[0].steps.number.tolist() == [3, 4]


def test_a_merged_trace_is_not_a_rank(job: Path) -> None:
    """What works on the trace of one rank refuses it; beside the folders of a run it is left out, by any name."""
    merged = merge_traces(job, job.parent / "all.json")
    trace = instrument.read_trace(merged.path)
    with pytest.raises(TraceError, match="it is a merged trace; read_trace reads it"):
        instrument.read_traces([merged.path])
    with pytest.raises(TraceError, match="it is a merged trace"):
        merge_traces(merged.path, job.parent / "again.json")
    with pytest.raises(ValueError, match="the trace of one rank, not a merged one"):
        slim(merged.path)
    with pytest.raises(ValueError, match="the trace of one rank, not a merged one"):
        add_gpu_lanes(trace, job.parent / "lanes.json")
    assert instrument.read_traces(job.parent).ranks == [0, 1]
    whole = instrument.read_traces([merged.path, job / "rank0.json", job / "rank1.json"])
    assert ([0, 1], {merged.path: "it is a merged trace"}) == (whole.ranks, whole.left_out)
    assert {} == instrument.diagnose(job / "rank0.json").left_out
    (job / "rank1.json").unlink()
    merged.path.rename(job / "all.json")
    assert {str(job / "all.json"): "it is a merged trace"} == instrument.diagnose(job).left_out


def test_chosen_ranks(tmp_path: Path) -> None:
    """Only the files of chosen ranks are read, where names have ranks; the ranks in the files decide."""
    for rank in range(3):
        write(tmp_path / "named" / f"rank{rank}.json", rank_events(), rank, 3)
        write(tmp_path / "swapped" / f"rank{rank}.json", rank_events(), 2 - rank, 3)
    (tmp_path / "named" / "rank1.json").write_text("unreadable")
    merged = merge_traces(tmp_path / "named", ranks=[2, 0])
    assert (list(merged.files), merged.missing, merged.failed) == ([0, 2], (), {})
    swapped = merge_traces(tmp_path / "swapped", ranks=[0])
    assert swapped.files == {0: tmp_path / "swapped" / "rank2.json"}


def test_a_missing_rank(job: Path) -> None:
    """A rank without a trace is named; to ask for it is an error."""
    (job / "rank1.json").unlink()
    result = CliRunner().invoke(app, ["merge", str(job)])
    assert "No trace of 1 rank: 1." in result.stdout
    for rank in (0, 2):
        write(job / f"rank{3 * rank}.json", rank_events(), 3 * rank, 30)
    few = CliRunner().invoke(app, ["merge", str(job)])
    shown = ", ".join(str(rank) for rank in range(1, 22) if rank != 6)
    assert f"No trace of 28 ranks: {shown} and 8 more." in " ".join(few.stdout.split())
    (job / "rank6.json").unlink()
    write(job / "rank0.json", rank_events(), 0)
    with pytest.raises(ValueError, match=r'"ranks" must be among those with a trace, 0: \[1\]'):
        merge_traces(job, ranks=[0, 1])
    result = CliRunner().invoke(app, ["merge", str(job), "--ranks", "1"])
    assert (result.exit_code, result.stderr) == (
        2, "instrument: --ranks must be among those with a trace, 0: [1]\n",
    )  # fmt: skip


def test_an_unreadable_file(job: Path) -> None:
    """A file that cannot be read is named and stops the merge, or is left out on request."""
    (job / "rank1.json").write_text('{"traceEvents": [')
    with pytest.raises(TraceError, match=r"rank1.json.*skip_unreadable=True merges the other ranks"):
        merge_traces(job)
    stopped = CliRunner().invoke(app, ["merge", str(job)])
    assert stopped.exit_code == 1
    assert "--skip-unreadable merges the other ranks" in stopped.stderr
    assert sorted(path.name for path in job.parent.iterdir()) == ["job"]
    for chosen in (None, [0, 1]):
        merged = merge_traces(job, ranks=chosen, skip_unreadable=True)
        assert (list(merged.files), [path.name for path in merged.failed]) == ([0], ["rank1.json"])
    with pytest.raises(TraceError, match=r"rank1.json"):
        merge_traces(job, ranks=[1], skip_unreadable=True)
    done = CliRunner().invoke(app, ["merge", str(job), "--skip-unreadable"])
    assert done.exit_code == 0
    said = " ".join(done.stdout.split())
    assert "Left out: " in said
    assert "rank1.json: " in said


def test_a_damaged_file(job: Path) -> None:
    """Of a file that is cut off, the whole events are merged, and the loss is named and kept."""
    text = (job / "rank1.json").read_text()
    (job / "rank1.json").write_text(text[:-40])
    merged = merge_traces(job)
    assert merged.damaged[1].events == 1
    assert instrument.read_trace(merged.path).lost.events == 1
    result = CliRunner().invoke(app, ["merge", str(job)])
    assert "The file of rank 1 could not be read completely" in " ".join(result.stdout.split())


def test_different_windows(tmp_path: Path) -> None:
    """Ranks of windows without a common step are not merged."""
    for rank in range(2):
        write(tmp_path / f"rank{rank}.json", rank_events(steps=range(3 + 7 * rank, 5 + 7 * rank)), rank)
    with pytest.raises(ValueError, match=r"must be of one window.*rank 0 has steps 3-4, rank 1 has steps 10-11"):
        merge_traces(tmp_path)


def test_chosen_steps(job: Path) -> None:
    """Of chosen steps, the events from the first start to the end of their last work are merged."""
    merged = merge_traces(job, steps=(4, 4))
    second = [one for one in rank_events() if one["ph"] != "M" and one["ts"] >= 1000]
    assert len(second) == 9
    for rank, content in own(merged).items():
        for one in content:
            one["ts"] += Decimal("5000.25") * rank
        assert comparable(content) == comparable(second)
    with pytest.raises(ValueError, match='"steps" must be recorded on all ranks: 4-5; rank 0 has 3-4'):
        merge_traces(job, steps=(4, 5))
    with pytest.raises(ValueError, match='"steps" must be recorded on all ranks: 4-1000000000000000'):
        merge_traces(job, steps=(4, 10**15))
    for wrong in ((4, 3), (-1, 3)):
        with pytest.raises(ValueError, match='"steps" must be the first and the last step'):
            merge_traces(job, steps=wrong)


def test_the_work_of_chosen_steps(tmp_path: Path) -> None:
    """Work that ends after its step is merged with it; what lasts into the steps is merged too."""
    late = [
        event("user_annotation", "training", 0, 5000),
        *(event("user_annotation", f"ProfilerStep#{step}", 100 * step, 90) for step in range(4)),
        event("cpu_op", "first", 10, 5),
        event("cuda_runtime", "cudaLaunchKernel", 110, 5, correlation=1),
        event("kernel", "late", 350, 60, pid=0, tid=5, device=0, stream=5, correlation=1),
        event("cpu_op", "meanwhile", 320, 5),
        event("cpu_op", "after", 420, 5),
    ]
    write(tmp_path / "job" / "rank0.json", late, 0, 1)
    found = own(merge_traces(tmp_path / "job", steps=(1, 1)))[0]
    shown = {one["name"] for one in found} - {"cudaLaunchKernel"}
    assert shown == {"training", "ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#3", "late", "meanwhile"}


def test_refused_arguments(job: Path) -> None:
    """Traces of other profilers, no ranks, and a trace as the output are refused."""
    with pytest.raises(ValueError, match='"ranks" must hold at least one rank'):
        merge_traces(job, ranks=[])
    with pytest.raises(ValueError, match="is the trace itself"):
        merge_traces(job, job / "rank1.json")
    with pytest.raises(ValueError, match="the folder of OUT does not exist"):
        merge_traces(job, job / "nowhere" / "all.json")
    with pytest.raises(FileNotFoundError):
        merge_traces(job / "nothing")
    for steps in ("4-3", "a", "3-"):
        result = CliRunner().invoke(app, ["merge", str(job), "--steps", steps])
        assert (result.exit_code, "--steps must be N or N-M" in result.stderr) == (2, True)


def test_a_failure_leaves_the_old_file(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a file disappears meanwhile, the file that was there stays, and nothing else."""
    out = job.parent / "all.json"
    merge_traces(job, out)
    before, align = out.read_bytes(), merge.align

    def remove(files: Mapping[int, Any]) -> Any:
        (job / "rank1.json").unlink()
        return align(files)

    monkeypatch.setattr(merge, "align", remove)
    with pytest.raises(OSError, match="No such file"):
        merge_traces(job, out)
    assert out.read_bytes() == before
    assert sorted(path.name for path in job.parent.iterdir()) == ["all.json", "job"]


JOB = """
import os, sys
import torch, torch.distributed as dist
import instrument

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with instrument.profile(sys.argv[1], schedule=instrument.schedule(at=[2, 5], active=2)) as prof:
    for _ in range(9):
        optimizer.zero_grad()
        with instrument.annotate("forward"):
            loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        optimizer.step()
        prof.step()
dist.barrier()
sys.stdout.flush()
os._exit(0)  # gloo sometimes aborts at exit
"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two gloo ranks with two windows: steps 2-3 and steps 5-6."""
    folder = tmp_path_factory.mktemp("gloo")
    script = folder / "job.py"
    script.write_text(JOB)
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    warm.run([sys.executable, script, folder / "run"], env, timeout=100, check=True, ranks=2)
    return folder / "run"


@pytest.mark.parametrize(("steps", "expected"), [(None, {5, 6}), ("2-3", {2, 3}), ("6", {6})])
def test_the_windows_of_a_run(run_folder: Path, tmp_path: Path, steps: str | None, expected: set[int]) -> None:
    """Of a run, the last window is merged, or the one with the chosen steps."""
    out = tmp_path / "all.json.gz"
    options = [] if steps is None else ["--steps", steps]
    result = CliRunner().invoke(app, ["merge", str(run_folder), "--out", str(out), *options])
    assert (result.exit_code, result.stderr) == (0, "")
    assert "of 2 ranks" in result.stdout
    assert "clocks of their machines" not in result.stdout  # both ran on this one
    trace = instrument.read_trace(out)
    assert Counter(trace.steps.number.tolist()) == dict.fromkeys(expected, 2)
    assert trace.regions.text("name").count("forward") == 2 * len(expected)
    assert [shown for shown in names_of(out) if "python" in shown] == ["rank 0: python", "rank 1: python"]


def test_steps_of_no_window(run_folder: Path) -> None:
    """Steps that no window of the run has are refused, with those that there are."""
    result = CliRunner().invoke(app, ["merge", str(run_folder), "--steps", "3-5"])
    assert result.exit_code == 2
    assert "--steps must be in one window of" in result.stderr
    assert "[2, 3], [5, 6]: 3-5" in result.stderr
