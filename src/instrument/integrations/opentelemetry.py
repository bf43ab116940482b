"""`OpenTelemetry`: the numbers of ``on_steps`` as metrics; slow steps and windows as spans."""

from __future__ import annotations

import os
import random
import socket
from contextlib import ExitStack
from functools import partial
from importlib.metadata import entry_points
from queue import SimpleQueue
from threading import Thread
from typing import Any

from .. import __version__
from ..base.guard import guard
from ..base.imports import loaded_modules
from ..base.patch import Patch
from ..record.slow_steps.step_numbers import PREFIX, StepNumbers
from .adapter import require

FEATURE = "OpenTelemetry"
CLOSE_S = 5.0
"""How long the end of a loop waits for the last export, in s."""

METRICS = {
    "instrument.step.duration": ("histogram", "s", "Time of a step."),
    "instrument.phase.time": ("counter", "s", "Time of a phase, summed over the steps."),
    "instrument.slow_steps": ("counter", "{step}", "Slow steps."),
    "instrument.samples": ("counter", "{sample}", "Samples that this process took."),
    "instrument.tokens": ("counter", "{token}", "Tokens that this process took."),
    "instrument.syncs": ("counter", "{sync}", "Waits of the CPU for the GPU."),
    "instrument.sync.time": ("counter", "s", "Time for which the CPU waited for the GPU."),
    "instrument.memory.peak": ("gauge", "By", "Most GPU memory that tensors took."),
    "instrument.windows": ("counter", "{window}", "Windows that were recorded."),
}
"""The kind, the unit and the description of each metric, by its name."""

_BUCKETS = [float(f"{digit}e{power}") for power in range(-3, 2) for digit in (1, 1.5, 2, 3, 5, 7)]  # 1 ms to 70 s
_OTLP = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}


class OpenTelemetry:
    """A function for ``on_steps`` that gives the numbers to OpenTelemetry.

    The providers are those given, else the global ones; the program shuts them down. If none is given, the first
    call makes own ones in place of a global one that the program has not set, which send by OTLP from threads of
    the SDK until the run ends. They are not global, and follow OpenTelemetry's environment variables, such as
    ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_SERVICE_NAME`` and ``OTEL_METRICS_EXPORTER``. Their resource has the
    rank, the world size and the folder of the run.

    The loop only hands the numbers over; a thread of its own records them. The end of the run waits 5 s at most
    for the last export. A forked process sends nothing of what its parent counted.

    Args:
        meter_provider: an `opentelemetry.metrics.MeterProvider`.
        tracer_provider: an `opentelemetry.trace.TracerProvider`.

    Raises:
        ImportError: OpenTelemetry, or an exporter that the environment names, is not installed.

    Example:
        >>> on_steps = instrument.every(100, instrument.OpenTelemetry(), samples=256)
        >>> for batch in instrument.steps(loader, "runs/bert", on_steps=on_steps):
        ...     train_step(batch)
    """

    takes_windows = True

    def __init__(self, meter_provider: Any = None, tracer_provider: Any = None) -> None:
        require("opentelemetry.sdk", "'torch-instrument[otel]'")
        from opentelemetry import metrics, trace

        self._given = meter_provider, tracer_provider
        if self._given == (None, None):  # an exporter that is missing is told here
            for signal, provider in (
                ("metrics", metrics.get_meter_provider()),
                ("traces", trace.get_tracer_provider()),
            ):
                if not _is_configured(provider):
                    _exporters(signal)
        self._process = 0
        self._thread: Thread | None = None

    def __call__(self, numbers: StepNumbers) -> None:
        """Hand ``numbers`` to the thread that records them."""
        if self._thread is None or self._process != os.getpid():
            self._process = os.getpid()
            self._inbox: SimpleQueue[StepNumbers | None] = SimpleQueue()
            run = partial(self._run, self._inbox)
            self._thread = Thread(target=run, name="instrument opentelemetry", daemon=True)
            self._thread.start()
        self._inbox.put(numbers)

    def close(self) -> None:
        """Have the last numbers recorded, and sent by own providers; wait 5 s at most."""
        thread, self._thread = self._thread, None
        if thread is not None and self._process == os.getpid():
            self._inbox.put(None)
            thread.join(CLOSE_S)

    @guard.contained(FEATURE)
    def _run(self, inbox: SimpleQueue[StepNumbers | None]) -> None:
        recorder = None
        with ExitStack() as stack:
            _leave_random_state(stack)
            for number, numbers in enumerate(iter(inbox.get, None)):
                with guard.contained(FEATURE):
                    if number == 0:
                        recorder = self._recorder(numbers, stack)
                    if recorder is not None:
                        recorder.record(numbers)

    def _recorder(self, numbers: StepNumbers, stack: ExitStack) -> _Recorder:
        from opentelemetry import metrics, trace

        meters, tracers = self._given
        meters, tracers = meters or metrics.get_meter_provider(), tracers or trace.get_tracer_provider()
        if self._given == (None, None):
            if not _is_configured(meters):
                meters = _own_meter_provider(_exporters("metrics"), numbers, stack)
            if not _is_configured(tracers):
                tracers = _own_tracer_provider(_exporters("traces"), numbers, stack)
        return _Recorder(meters, tracers)


class _Recorder:
    """Records numbers as metrics, and slow steps and windows as spans."""

    def __init__(self, meter_provider: Any, tracer_provider: Any) -> None:
        meter = meter_provider.get_meter("instrument", __version__)
        make = {
            "histogram": partial(meter.create_histogram, explicit_bucket_boundaries_advisory=_BUCKETS),
            "counter": meter.create_counter,
            "gauge": meter.create_gauge,
        }
        self._metrics = {
            name.removeprefix("instrument."): make[kind](name, unit=unit, description=text)
            for name, (kind, unit, text) in METRICS.items()
        }
        self._tracer = tracer_provider.get_tracer("instrument", __version__)

    def record(self, numbers: StepNumbers) -> None:
        """Record ``numbers``; means of phases become sums, which add up over time and ranks."""
        rank = {"instrument.rank": numbers.rank}
        mean = {name.removeprefix(PREFIX): value for name, value in numbers.items()}
        steps = len(numbers.durations_ns)
        for duration_ns in numbers.durations_ns:
            self._metrics["step.duration"].record(duration_ns / 1e9, rank)
        for name in [name for name in mean if name.startswith("phase_")]:
            phase = {"instrument.phase.name": name.removeprefix("phase_").removesuffix("_s")}
            self._metrics["phase.time"].add(mean[name] * steps, rank | phase)
        self._metrics["slow_steps"].add(len(numbers.slow_steps), rank)
        self._metrics["windows"].add(len(numbers.windows), rank)
        for name, total in numbers.totals.items():
            self._metrics["sync.time" if name == "sync_wait_s" else name].add(total, rank)
        if "memory_peak_bytes" in mean:
            self._metrics["memory.peak"].set(mean["memory_peak_bytes"], rank)
        self._add_spans(numbers, rank)

    def _add_spans(self, numbers: StepNumbers, rank: dict[str, Any]) -> None:
        for slow in numbers.slow_steps:
            about = {
                "instrument.step.number": slow.step,
                "instrument.step.usual_duration": slow.usual_ns / 1e9,
                "instrument.step.score": slow.score,
                "instrument.step.cause": slow.cause,
                **{f"instrument.step.phase.{name}": time.ns / 1e9 for name, time in slow.phases.items()},
            }
            begin_ns = slow.ended_ns - slow.duration_ns
            span = self._tracer.start_span("slow step", start_time=begin_ns, attributes=rank | about)
            span.end(slow.ended_ns)
        for window in numbers.windows:
            files = [str(file.absolute()) for file in window.files]
            about = {
                "instrument.window.name": str(window.window),
                "instrument.window.first_step": window.first_step,
                "instrument.window.last_step": window.last_step,
                "instrument.window.files": files,
            }
            if files:
                about["file.path"] = files[0]
            span = self._tracer.start_span("window", start_time=window.begin_ns, attributes=rank | about)
            span.end(window.end_ns)


def _is_configured(provider: Any) -> bool:
    """Return whether the program has set ``provider``: the API alone has proxies and providers that do nothing."""
    return not type(provider).__module__.startswith(("opentelemetry.metrics", "opentelemetry.trace"))


def _exporters(signal: str) -> list[Any]:
    """Return the classes that the environment names for ``signal``, as the SDK finds them; by default OTLP's."""
    named = os.environ.get(f"OTEL_{signal.upper()}_EXPORTER") or "otlp"
    general = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL") or general or "http/protobuf"
    classes = []
    for name in map(str.strip, named.split(",")):
        if name == "none":
            continue
        name = _OTLP.get(protocol, protocol) if name == "otlp" else name
        found = entry_points(group=f"opentelemetry_{signal}_exporter")
        if name not in found.names:
            package = f"opentelemetry-exporter-{name.replace('_', '-')}"
            known = ", ".join(sorted(found.names)) or "none"
            raise ImportError(f'no exporter "{name}" for {signal}: there are {known}; pip install {package}')
        classes.append(found[name].load())
    return classes


def _own_meter_provider(kinds: list[Any], numbers: StepNumbers, stack: ExitStack) -> Any:
    """Return a provider with exporters or readers of ``kinds``, which is shut down when ``stack`` is closed."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader

    resource, made = _resource(numbers), [kind() for kind in kinds]
    readers = [  # made last: each starts a thread
        each if isinstance(each, MetricReader) else PeriodicExportingMetricReader(_of_this_process(each))
        for each in made
    ]
    provider = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
    stack.callback(provider.shutdown)
    return provider


def _own_tracer_provider(kinds: list[Any], numbers: StepNumbers, stack: ExitStack) -> Any:
    """Return a provider with exporters of ``kinds``, which is shut down when ``stack`` is closed."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=_resource(numbers), shutdown_on_exit=False)
    stack.callback(provider.shutdown)
    for kind in kinds:
        provider.add_span_processor(BatchSpanProcessor(kind()))
    return provider


def _resource(numbers: StepNumbers) -> Any:
    """Return what describes this process; the program's environment says it better."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    host, process = socket.gethostname(), os.getpid()
    attributes: dict[str, Any] = {
        "service.name": "training",
        "service.instance.id": f"{host}:{process}",
        "host.name": host,
        "process.pid": process,
        "instrument.rank": numbers.rank,
        "instrument.world_size": numbers.world_size,
        **({} if numbers.run is None else {"instrument.run": str(numbers.run)}),
    }
    given = OTELResourceDetector().detect().attributes
    return Resource.create({name: value for name, value in attributes.items() if name not in given})


def _of_this_process(exporter: Any) -> Any:
    """Return ``exporter``, made inert in forked processes, in which the SDK starts its reader again."""
    from opentelemetry.sdk.metrics.export import MetricExportResult

    export, process = exporter.export, os.getpid()

    def export_here(*args: Any, **kwargs: Any) -> Any:
        return export(*args, **kwargs) if os.getpid() == process else MetricExportResult.SUCCESS

    exporter.export = export_here
    return exporter


def _leave_random_state(stack: ExitStack) -> None:
    """Let OpenTelemetry draw ids and delays from the system, not from the generator that the program may seed."""
    for name, module, names in loaded_modules():
        if name.startswith("opentelemetry.") and names.get("random") is random:
            Patch(module, "random", lambda _: random.SystemRandom()).apply_in(stack)
