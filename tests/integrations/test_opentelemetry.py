"""`OpenTelemetry`: what arrives at an OTLP receiver and at Prometheus, and that it never delays the loop."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry import metrics, trace
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider, id_generator
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import instrument
from instrument.integrations import opentelemetry
from instrument.integrations.opentelemetry import METRICS
from instrument.record.slow_steps.judging import PhaseTime, SlowStep
from instrument.record.slow_steps.step_numbers import RecordedWindow, StepNumbers
from tests.support.programs import ROOT

MS = 1_000_000
END_NS = 1_800_000_000_000_000_000  # in 2027
GUIDE = (ROOT / "docs" / "dashboards.md").read_text()
DASHBOARD = json.loads((ROOT / "docs" / "grafana.json").read_text())


def numbers(run: Path | None = Path("runs/bert")) -> StepNumbers:
    """Return three steps of rank 3, one of them slow, with everything that can be known."""
    phases = {"data": PhaseTime(21 * MS, MS), "other": PhaseTime(9 * MS, 9 * MS)}
    slow = SlowStep(7, 30 * MS, 10 * MS, 9.5, phases, ended_ns=END_NS)
    window = RecordedWindow(0, (Path("/runs/bert/0/rank3.json.gz"),), 4, 6, END_NS - 90 * MS, END_NS - 60 * MS)
    means = {
        "phase_data_s": 0.008,
        "phase_other_s": 0.012,
        "memory_peak_bytes": 1 << 30,
    }
    return StepNumbers(
        {f"instrument/{name}": value for name, value in means.items()},
        first_step=7,
        durations_ns=[30 * MS, 10 * MS, 20 * MS],
        slow_steps=[slow],
        windows=[window],
        rank=3,
        world_size=8,
        run=run,
        totals={"samples": 6, "tokens": 60, "syncs": 6, "sync_wait_s": 0.003},
    )


class Receiver:
    """An OTLP receiver over HTTP, which keeps what arrives.

    Attributes:
        metrics: the last export of metrics by name, as the data of the protocol.
        spans: all spans.
        resource: the attributes of the last resource.
        requests: how many requests came.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}
        self.spans: list[Any] = []
        self.resource: dict[str, Any] = {}
        self.requests = 0

    def take(self, path: str, body: bytes) -> None:
        self.requests += 1
        if path == "/v1/metrics":
            for sent in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                self.resource = attributes(sent.resource)
                self.metrics |= {each.name: each for scope in sent.scope_metrics for each in scope.metrics}
        elif path == "/v1/traces":
            for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resource = attributes(sent.resource)
                self.spans += [span for scope in sent.scope_spans for span in scope.spans]

    def points(self, name: str) -> list[Any]:
        metric = self.metrics[name]
        return list(getattr(metric, metric.WhichOneof("data")).data_points)

    def values(self, name: str) -> list[float]:
        return [point.as_double or point.as_int for point in self.points(name)]


def attributes(of: Any) -> dict[str, Any]:
    found = {}
    for each in of.attributes:
        value = getattr(each.value, each.value.WhichOneof("value"))
        found[each.key] = [item.string_value for item in value.values] if hasattr(value, "values") else value
    return found


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Receive what own providers send."""
    received = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield received
        server.shutdown()
        serving.join()


def test_metrics_at_a_receiver(receiver: Receiver) -> None:
    """Every metric of the table arrives once the loop ends, with its kind and its unit; means become sums."""
    telemetry = instrument.OpenTelemetry()
    telemetry(numbers())
    telemetry(numbers())
    telemetry.close()
    kinds = {"histogram": "histogram", "sum": "counter", "gauge": "gauge"}
    arrived = {name: (kinds[each.WhichOneof("data")], each.unit) for name, each in receiver.metrics.items()}
    assert {name: (kind, unit) for name, (kind, unit, _) in METRICS.items()} == arrived
    (durations,) = receiver.points("instrument.step.duration")
    assert (6, pytest.approx(0.12)) == (durations.count, durations.sum)
    assert {"instrument.rank": 3} == attributes(durations)
    assert [0.001, 70] == [durations.explicit_bounds[0], durations.explicit_bounds[-1]]
    phases = receiver.points("instrument.phase.time")
    assert {"data": pytest.approx(0.048), "other": pytest.approx(0.072)} == {
        attributes(point)["instrument.phase.name"]: point.as_double for point in phases
    }
    assert [pytest.approx(12)] == receiver.values("instrument.samples")
    assert [pytest.approx(120)] == receiver.values("instrument.tokens")
    assert [pytest.approx(12)] == receiver.values("instrument.syncs")
    assert [pytest.approx(0.006)] == receiver.values("instrument.sync.time")
    assert [1 << 30] == receiver.values("instrument.memory.peak")
    assert [2] == receiver.values("instrument.slow_steps") == receiver.values("instrument.windows")


def test_spans_at_a_receiver(receiver: Receiver) -> None:
    """Slow steps and windows are spans with the times at which they ran; a window names its files."""
    telemetry = instrument.OpenTelemetry()
    telemetry(numbers())
    telemetry.close()
    spans = {span.name: span for span in receiver.spans}
    assert {"slow step", "window"} == set(spans)
    slow, window = spans["slow step"], spans["window"]
    assert (END_NS - 30 * MS, END_NS) == (slow.start_time_unix_nano, slow.end_time_unix_nano)
    assert {
        "instrument.rank": 3,
        "instrument.step.number": 7,
        "instrument.step.usual_duration": 0.01,
        "instrument.step.score": 9.5,
        "instrument.step.cause": "data",
        "instrument.step.phase.data": 0.021,
        "instrument.step.phase.other": 0.009,
    } == attributes(slow)
    assert (END_NS - 90 * MS, END_NS - 60 * MS) == (window.start_time_unix_nano, window.end_time_unix_nano)
    assert {
        "instrument.rank": 3,
        "instrument.window.name": "0",
        "instrument.window.first_step": 4,
        "instrument.window.last_step": 6,
        "instrument.window.files": ["/runs/bert/0/rank3.json.gz"],
        "file.path": "/runs/bert/0/rank3.json.gz",
    } == attributes(window)


def test_resource_of_the_job(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resource says which process of which run it is; what the environment says of it comes first."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "host.name=node7,deployment.environment.name=lab")
    telemetry = instrument.OpenTelemetry()
    telemetry(numbers())
    telemetry.close()
    expected = {
        "service.name": "training",
        "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
        "host.name": "node7",
        "deployment.environment.name": "lab",
        "process.pid": os.getpid(),
        "instrument.rank": 3,
        "instrument.world_size": 8,
        "instrument.run": "runs/bert",
    }
    assert expected == {name: receiver.resource.get(name) for name in expected}
    monkeypatch.setenv("OTEL_SERVICE_NAME", "bert")
    telemetry = instrument.OpenTelemetry()
    telemetry(numbers(run=None))
    telemetry.close()
    assert "bert" == receiver.resource["service.name"]
    assert "instrument.run" not in receiver.resource


def test_providers_of_the_program(monkeypatch: pytest.MonkeyPatch, receiver: Receiver) -> None:
    """Providers that are given or global get the numbers, stay open, and nothing is sent elsewhere."""
    reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
    meter_provider, tracer_provider = MeterProvider([reader]), TracerProvider()
    tracer_provider.add_span_processor(SimpleSpanProcessor(spans))
    early = instrument.OpenTelemetry()  # the first call looks for the global ones
    telemetry = [instrument.OpenTelemetry(meter_provider, tracer_provider)]
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: meter_provider)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: tracer_provider)
    telemetry += [early, instrument.OpenTelemetry(meter_provider)]
    for each in telemetry:
        each(numbers())
        each.close()
    (resource,) = reader.get_metrics_data().resource_metrics
    (steps,) = (each for each in resource.scope_metrics[0].metrics if each.name == "instrument.step.duration")
    assert 9 == steps.data.data_points[0].count
    assert ["slow step", "window"] * 3 == [span.name for span in spans.get_finished_spans()]
    assert 0 == receiver.requests
    meter_provider.shutdown()
    tracer_provider.shutdown()


def test_a_program_that_only_traces(monkeypatch: pytest.MonkeyPatch, receiver: Receiver) -> None:
    """Where the program has set one of the global providers, the other is an own one."""
    spans, tracer_provider = InMemorySpanExporter(), TracerProvider()
    tracer_provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: tracer_provider)
    telemetry = instrument.OpenTelemetry()
    telemetry(numbers())
    telemetry.close()
    assert set(METRICS) == set(receiver.metrics)
    assert (2, []) == (len(spans.get_finished_spans()), receiver.spans)
    tracer_provider.shutdown()


def test_exporters_by_environment(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names the exporters, as for the SDK's own start; one that is missing is said at once."""
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp_proto_http")
    telemetry = instrument.OpenTelemetry()
    telemetry(numbers())
    telemetry.close()
    assert (2, {}) == (len(receiver.spans), receiver.metrics)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/nothing")
    with pytest.raises(ImportError, match=r'no exporter "http/nothing" for traces: there are .*otlp_proto_http'):
        instrument.OpenTelemetry()


def test_a_loop_sends_its_steps(receiver: Receiver) -> None:
    """The steps of a loop arrive, also those after the last full interval."""
    with instrument.black_box(on_steps=instrument.every(4, instrument.OpenTelemetry(), samples=2)) as box:
        for _ in range(10):
            box.step()
    (durations,) = receiver.points("instrument.step.duration")
    assert 9 == durations.count  # the first step belongs to the start
    assert [20] == receiver.values("instrument.samples")


def test_slow_steps_know_when_they_ended() -> None:
    """The time of a slow step is that of its end, also if the numbers are given much later."""
    found: list[StepNumbers] = []
    ended = []
    with instrument.black_box(on_steps=instrument.every(100, found.append)) as box:
        for step in range(99):
            time.sleep(0.05 if step == 80 else 0.001)
            box.step()
            ended.append(time.time_ns())
    (slow,) = (slow for numbers in found for slow in numbers.slow_steps if slow.step == 80)
    assert abs(slow.ended_ns - ended[80]) < 20 * MS


@pytest.mark.parametrize("answers", [False, None], ids=["accepts and never answers", "nobody listens"])
def test_a_dead_endpoint(answers: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint that is dead delays no call, and the end of the loop by a bounded time only."""
    monkeypatch.setattr(opentelemetry, "CLOSE_S", 0.5)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")  # so that the test's threads end soon
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        if answers is None:
            server.close()
        telemetry = instrument.OpenTelemetry()
        calls = []
        for _ in range(20):
            begin = time.perf_counter()
            telemetry(numbers())
            calls.append(time.perf_counter() - begin)
            time.sleep(0.01)
        thread = telemetry._thread
        begin = time.perf_counter()
        telemetry.close()
        closing = time.perf_counter() - begin
    assert sorted(calls)[10] < 0.001
    assert closing < 1
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked process sends nothing of its parent's, and a loop of its own sends its own numbers."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "30")
    telemetry = instrument.OpenTelemetry()
    telemetry(numbers())
    while not receiver.metrics:
        time.sleep(0.01)
    begin, parent_done = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(parent_done)
            os.read(begin, 1)
            telemetry(numbers())
            telemetry.close()
        finally:
            os._exit(0)
    try:
        telemetry.close()
        sent = receiver.requests
        time.sleep(0.3)  # ten intervals
        assert sent == receiver.requests
    finally:
        os.close(parent_done)
        os.waitpid(child, 0)
    assert child == receiver.resource["process.pid"]
    (durations,) = receiver.points("instrument.step.duration")
    assert 3 == durations.count


def test_random_state(receiver: Receiver) -> None:
    """Ids of spans and delays of exports are not drawn from the generator that the program seeds."""
    random.seed(3)
    before = random.getstate()
    telemetry = instrument.OpenTelemetry()
    telemetry(numbers())
    telemetry.close()
    assert receiver.spans
    assert before == random.getstate()
    assert random is id_generator.random


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the packages the error says what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=re.escape("pip install 'torch-instrument[otel]'")):
        instrument.OpenTelemetry()


def test_an_exporter_that_cannot_start(
    lenient: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure is logged, the numbers that follow are dropped, and no thread of the SDK is left."""
    telemetry = instrument.OpenTelemetry()
    monkeypatch.setattr(opentelemetry, "_resource", partial(int, "none"))
    telemetry(numbers())
    telemetry(numbers())
    inbox = telemetry._inbox
    telemetry.close()
    assert inbox.empty()
    assert not any(thread.name.startswith("Otel") for thread in threading.enumerate())


@pytest.fixture(scope="module")
def scrape() -> dict[str, str]:
    """Return what Prometheus gets: the type of each metric by its name."""
    exporter = pytest.importorskip("opentelemetry.exporter.prometheus")
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    provider = MeterProvider([exporter.PrometheusMetricReader(registry=registry)], Resource.create({}))
    telemetry = instrument.OpenTelemetry(provider)
    telemetry(numbers())
    telemetry.close()
    text = prometheus_client.generate_latest(registry).decode()
    provider.shutdown()
    return dict(re.findall(r"^# TYPE (instrument_\w+) (\w+)$", text, re.MULTILINE))


def test_table_of_the_guide(scrape: dict[str, str]) -> None:
    """The table has every metric: its name, that in Prometheus, its kind and its unit."""
    rows = re.findall(
        r"^\| `(instrument[\w.]+)` \| `(instrument_\w+)` \| (\w+) \| `(\S+)` \|", GUIDE, re.MULTILINE
    )
    assert [(name, kind, unit) for name, (kind, unit, _) in METRICS.items()] == [
        (name, kind, unit) for name, _, kind, unit in rows
    ]
    assert scrape == {prometheus: kind for _, prometheus, kind, _ in rows}


def test_queries_of_the_dashboard(scrape: dict[str, str]) -> None:
    """The dashboard shows every metric, under the names that Prometheus gives, and no other."""
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"instrument_\w+(?=\{)", query)}
    series = {re.sub("_(bucket|sum|count)$", "", name) for name in asked}
    assert set(scrape) == series
    variables = [each["query"]["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    assert all(re.search(rf"\b({'|'.join(scrape)})(_count)?\b", variable) for variable in variables)
