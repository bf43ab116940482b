"""Records windows with torch.profiler and writes Chrome traces.

Each window has its own profiler object: a scheduled one that is started again loses all but one trace.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import mkstemp
from threading import get_ident, main_thread
from typing import Any, ClassVar, Literal, get_args

from ...base import log
from ...base.compat import autograd, gpu, kineto, profilers, tools
from ...base.compat.gpu import devices_in_use
from ...base.errors import CaptureError
from ...base.files import make_folder, part_file
from ...base.interrupts import Suppressed, is_interrupt
from ...base.job import job_without_group
from ...base.trace_marks import DETAIL, STEP_PREFIX, STEPS, TASKS, UNRECORDED
from .. import gpu_wait
from ..planning.schedule import SCHEDULE_OPTIONS
from ..regions import dispatch
from ..regions.region import Region, plain
from ..regions.torch_emitters import TorchProfilerEmitter, torch_emitter
from .raw_trace import check_is_complete, copy_trace, unpack
from .sessions import OTHER_WINDOW, OpenRanges, sessions

Detail = Literal["regions", "operators", "full"]
DETAILS = get_args(Detail)
_FULL = ("record_shapes", "profile_memory", "with_stack", "with_flops")
_OWN_ARGUMENTS = ("schedule", "on_trace_ready")
# Names that users may have meant by an option that torch does not know.
_PROFILE_ARGUMENTS = (
    "out",
    "schedule",
    "on_trace_ready",
    "exporter",
    "ranks",
    "first_step",
    "detail",
    "keep",
    "upload",
)
# Why a window holds less than planned, or nothing.
_IN_WARMUP = "another torch profiler began during warm-up"
_BEGAN_INSIDE = "another torch profiler began inside the window, which ended its recording"
_ON_ANOTHER_THREAD = "another torch profiler began on another thread inside the window, which ended its recording"
_IN_OPERATOR = (
    "another torch profiler began inside the window, in an operator or the backward pass, where torch cannot stop"
)
# Why a window is recorded without GPU activity.
_USED_LATE = (
    "the GPU was first used inside the window, which is recorded without it; let the window begin after the"
    " first step, or call torch.{kind}.init()"
)
_WITHOUT_GPU = (
    "torch's profiler records no GPU in this process, as its first recording, perhaps the program's own, was of"
    " the CPU only; include the GPU in that recording, after torch.{kind}.init()"
)
_PERHAPS_REFUSED = (
    "torch's profiler records no GPU in this process. Either the interface of the GPU's profiler is refused, as"
    " without rights, in a virtual machine or beside another tool: Kineto's messages say so. Or the first"
    " recording, the program's own, was of the CPU only: include the GPU in it, after torch.{kind}.init()"
)
_NO_RECORD = "the GPU's profiling interface gave no record of this window"
_NO_SECOND_BACKEND = (
    "the GPU is missing: torch's second backend (custom_profiler_config) could not start; it needs a CUPTI of 13.3"
    " or newer that no other tool uses"
)
SUFFIX = ".pt.trace.json"  # the suffix that TensorBoard's profiler plugin finds


class TorchProfilerExporter:
    """Makes a fresh `torch.profiler.profile` for each window.

    Devices are queried when a window opens, and only if the program uses one.

    Args:
        options: arguments for `torch.profiler.profile` except ``schedule`` and ``on_trace_ready``.
        detail: what is recorded; its options are defaults for ``options``.
        keeps_events: whether the events are read in this process, as by ``key_averages()``. Without them, the
            end of a window takes torch a quarter less time.

    Raises:
        TypeError: an option that torch.profiler does not know.
        ValueError: a value that torch.profiler refuses.
    """

    name = "torch_profiler"
    hint = ""
    _warned: ClassVar[set[str]] = set()  # the tools that were warned about in this process

    def __init__(
        self, options: Mapping[str, Any], detail: Detail = "operators", *, keeps_events: bool = True
    ) -> None:
        from torch.profiler import ProfilerActivity

        # With acc_events, the next capture includes the events of this one.
        self._last_capture: TorchProfilerCapture | None = None
        self._detail = detail
        self._options = options_for(detail, options)
        tool = tools.gpu_tracer()
        if tool is not None:
            # The GPU's tracing interface has one user at a time; a second one breaks both recordings.
            self._options["activities"] = [ProfilerActivity.CPU]
            if tool not in self._warned:
                self._warned.add(tool)
                log.warning(f"{tool} traces the GPU: torch.profiler records the CPU only")
        check_values(options, self._options)
        if not keeps_events:
            self._options = profilers.without_events(self._options)

    def prepare(self) -> None:
        """Search all objects of the process for profilers that have prepared."""
        sessions.follow_profilers()

    def capture(self) -> TorchProfilerCapture:
        """Make a profiler and warm it up."""
        sessions.follow_profilers()
        before = sessions.capture
        try:
            return TorchProfilerCapture(self._options, self._accumulate, self._detail)
        except BaseException:
            if sessions.capture is not before:  # interrupted after torch's profiler was prepared
                sessions.stop_capture()
            raise

    def _accumulate(self, capture: TorchProfilerCapture) -> None:
        """With ``acc_events``, include the events of the previous capture in ``capture``."""
        if self._options.get("acc_events"):
            if self._last_capture is not None:
                profilers.accumulate_events(capture.profiler.profiler, self._last_capture.profiler.profiler)
            self._last_capture = capture


class TorchProfilerCapture:
    """One `torch.profiler.profile`, started and stopped once; `profiler` is that object.

    If the GPU is not in use yet, `start` makes the profiler, as the recorded activities cannot be changed later.

    Args:
        options: the arguments of the profiler.
        prepared: called with this capture once it is prepared.
        detail: what is recorded.

    Attributes:
        ended: whether the recording ended before `stop`; it is complete up to that point.
        incomplete: why the recording is incomplete; known once it is saved.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        prepared: Callable[[TorchProfilerCapture], None] = lambda _: None,
        detail: Detail = "operators",
    ) -> None:
        self._refuse_second()
        self._detail = detail
        self._emitter: TorchProfilerEmitter | None = None  # for the ranges of steps
        self._step: Any = None
        self._steps: tuple[int, int] | None = None  # the first and the last marked step
        self._thread = 0  # the thread that records
        self._loss_reason = ""  # why the recording is lost
        self._ranges: OpenRanges | None = None  # the program's own ranges, opened during the recording
        self._memory: Any = None  # keeps a lost recording alive, as open ranges still write to it
        self._let_go: Callable[[], Any] = bool  # ends `kineto.hold_recording`
        self.ended = False
        self.incomplete: list[str] = []
        self.raw: Path | None = None  # the trace as torch wrote it
        self._written = ""  # the path of the trace, if it had to be written before `save`
        self.profiler: Any = None
        self._options = options
        self._on_prepared = prepared
        self._prepared = False
        self._must_have_gpu_events = False  # whether a GPU that it should record was waited for
        self._gpu_was_in_use = False  # whether the program used the GPU when this was prepared
        if gpu.in_use() is not None or not gpu.supported():
            self._prepare()

    def _refuse_second(self) -> None:
        if sessions.owner is not None or profilers.running():
            sessions.recover()
        if sessions.owner is not None or profilers.running():
            other = "another torch profiler is active" if sessions.capture is None else OTHER_WINDOW
            raise CaptureError(sessions.stop_failure or other)

    def _prepare(self) -> None:
        from torch.profiler import profile

        self._gpu_was_in_use = gpu.in_use() is not None
        activities = profilers.window_activities(self._options.get("activities"))
        self.profiler = profile(**{**self._options, "activities": activities})
        with sessions.take_over(self), profilers.suppress_cycle_warning(), profilers.without_inductor():
            try:
                self.profiler.prepare_trace()
            except RuntimeError as error:
                if "activity type name" not in str(error):
                    raise
                raise CaptureError(f'torch.profiler refuses "activities": {error}') from None
            self._prepared = True
        self._on_prepared(self)

    def start(self) -> None:
        """Start recording."""
        self._check()
        if profilers.running():
            raise CaptureError(_IN_WARMUP)
        if not self._prepared:
            self._refuse_second()
            self._prepare()
        self._thread = get_ident()
        self._ranges = OpenRanges()
        self._ranges.follow()
        self._emitter = torch_emitter(self.profiler.profiler)
        with profilers.without_inductor():  # torch 2.6 looks for it here
            self._start_trace()
        if self._thread != main_thread().ident:  # may be killed at exit, with no chance to stop
            self._let_go = kineto.hold_recording()
        self.add_metadata(DETAIL, self._detail)
        job = job_without_group()
        if job is not None:
            self.profiler.add_metadata_json("distributedInfo", json.dumps(job))

    @kineto.without_start_and_stop()
    def _start_trace(self) -> None:
        try:
            with profilers.named_ranges_only() if self._detail == "regions" else nullcontext():
                self.profiler.start_trace()
        except BaseException:
            sessions.note_stop(self)
            raise

    def step(self, number: int | None) -> None:
        """End the current step, and begin step ``number`` under the name that trace viewers know."""
        self._check()
        self._end_step()
        if number is not None and not self.ended and self._emitter is not None:
            self._step = self._emitter.push(Region(f"{STEP_PREFIX}{number}", 0))
            self._steps = self._steps[0] if self._steps else number, number

    def _end_step(self) -> None:
        step, self._step = self._step, None
        if step is not None and self._emitter is not None:
            self._emitter.close(step)

    def add_metadata(self, key: str, value: str) -> None:
        """Put a text into the trace."""
        if not self.ended:  # torch would put it into the other profiler's trace
            self.profiler.add_metadata_json(plain(key), f'"{plain(value)}"')

    def stop(self) -> None:
        """Stop recording; takes 1.4 s for 500,000 events."""
        self._check()
        if self.ended or not self._prepared:  # the latter if an interrupt came after torch had stopped
            return
        self._add_notes()
        self._stop()
        if not self._gpu_was_in_use and self._options.get("activities") is None:
            self._without_gpu(_USED_LATE)

    def _add_notes(self) -> None:
        """Put into the trace which asyncio tasks opened its regions, and which regions it lacks."""
        notes = dispatch.active.notes
        if notes is None:
            return
        if notes.switches:
            tasks = {"thread": notes.thread, "switches": notes.switches}
            self.profiler.add_metadata_json(TASKS, json.dumps(tasks))
        if notes.unrecorded and not profilers.records_all_threads(self._options):
            self.profiler.add_metadata_json(UNRECORDED, json.dumps(notes.unrecorded))

    def _without_gpu(self, why: str) -> None:
        """Note why the GPU is not recorded, if the program uses one now."""
        module = gpu.in_use()
        if module is not None and gpu.supported():
            self.incomplete.append(why.format(kind=module.__name__.removeprefix("torch.")))

    def step_aside(self) -> Any:
        """Stop, as another profiler is about to prepare on this thread; return torch's results, if any.

        If torch cannot stop, the recording is lost.
        """
        if not self._thread:
            try:
                self.discard()
            finally:
                self._loss_reason = _IN_WARMUP
        elif self._thread != get_ident():
            self._loss_reason = _ON_ANOTHER_THREAD
        elif autograd.in_operator():
            self._loss_reason = _IN_OPERATOR
            self._memory = kineto.leave_recording()
            self._end_ranges()
        else:
            self.step(None)
            self._leave_out_last()
            self.stop()
            self.ended, self.incomplete = True, [_BEGAN_INSIDE, *self.incomplete]
            self._write_early()
            return self.profiler.profiler and self.profiler.profiler.kineto_results
        return None

    def _write_early(self) -> None:
        """Write the trace before the other profiler prepares: its clock would be applied to the GPU's times."""
        if self.profiler is not None and self.profiler.use_device:
            descriptor, name = mkstemp(suffix=SUFFIX)
            os.close(descriptor)
            weakref.finalize(self, Path(name).unlink, missing_ok=True)
            self._export(Path(name))
            self._written = name

    def _export(self, path: Path) -> None:
        """Have torch write the trace."""
        if not profilers.export_trace(self.profiler, str(path)):
            self.incomplete.append(_NO_SECOND_BACKEND)
        unpack(path)

    def _leave_out_last(self) -> None:
        """Put the complete steps into the trace: all but the last one, unless it is the only one."""
        if self._steps is not None:
            first, last = self._steps
            self.add_metadata(STEPS, f"{first}-{max(first, last - 1)}")

    def _check(self) -> None:
        """If the recording is lost, clean up and raise the reason."""
        if self._loss_reason:
            if self._thread and profilers.running() and sessions.owner_on_another_thread:
                kineto.leave_recording()
                sessions.recover()
            self._end_ranges()
            self._end_step()
            self._memory = None
            self._release_memory()
            raise CaptureError(self._loss_reason)

    def _stop(self) -> None:
        self._prepared = False  # a second start after this, as by `discard` after an interrupt, crashes torch
        try:
            self._end_step()  # a range that is freed in the next recording crashes torch
            self._stop_trace()
            self._end_ranges()
        except BaseException as error:
            self._force_stop(error)
            self._end_ranges()  # again, if the first call failed
            raise
        finally:
            sessions.release(self)
            if not profilers.running():
                self._release_memory()

    def _release_memory(self) -> None:
        let_go, self._let_go = self._let_go, bool
        let_go()

    @kineto.without_start_and_stop()
    def _stop_trace(self) -> None:
        """Stop; include the kernels that still run, if the GPU is in use and can be synchronized."""
        profiler = self.profiler.profiler
        if profiler is None or not (profiler.use_device or profilers.has_second_backend(self.profiler)):
            self.profiler.stop_trace()
            return
        self.incomplete = gpu_wait.synchronize()
        waited = not self.incomplete and bool(devices_in_use())  # a call of the GPU's runtime in this window
        self._must_have_gpu_events = waited and self._options.get("activities") is None
        with _unsynchronized(profiler):
            self.profiler.stop_trace()

    def _end_ranges(self) -> None:
        if self._ranges is not None:
            self._ranges.end()
            self._ranges = None

    @kineto.without_start_and_stop()
    def _force_stop(self, error: BaseException) -> None:
        """End torch's recording after its stop failed, or the next window would find an active profiler."""
        self._loss_reason = f"the recording could not be stopped: {type(error).__name__}: {error}"
        with Suppressed(Exception):
            if profilers.running() and self.profiler.profiler is not None:
                with _unsynchronized(self.profiler.profiler):
                    self.profiler.profiler.__exit__(None, None, None)
        sessions.note_stop(self)
        if profilers.running():
            sessions.stop_failure = f"the recording of an earlier window could not be stopped: {error!r}"
            sessions.release(self)
            sessions.recover()

    def save(self, folder: Path, stem: str) -> list[Path]:
        """Write the trace: 4-7 ms for each MB."""
        make_folder(folder)
        raw = folder / f"{stem}{SUFFIX}"
        with part_file(raw) as part:
            if self._written:
                shutil.copyfile(self._written, part)
            else:
                self._export(part)
            check_is_complete(part)  # torch does not raise
            part.replace(raw)  # not synced: the finishing process does what takes time
        self.raw = raw
        if self.profiler.use_device == "cuda" and not profilers.has_second_backend(self.profiler):
            if not kineto.is_set_up_for_gpu(raw):
                self._without_gpu(_WITHOUT_GPU if sessions.saw_cpu_only else _PERHAPS_REFUSED)
            elif self._must_have_gpu_events and not kineto.has_gpu_events(raw):
                self.incomplete.append(_NO_RECORD)
        return [raw]

    def export(self, path: str) -> None:
        """Copy the trace, which torch itself writes only once, to ``path``; gzipped if it ends in ".gz"."""
        if self.raw is None:
            raise CaptureError("the trace of this window could not be saved")
        copy_trace(self.raw, path)

    def discard(self) -> None:
        """End a capture that never started: start and stop it, or the next one would find it prepared."""
        if self._loss_reason:
            return
        try:
            if profilers.running():
                if self._thread:  # `start` was interrupted
                    self._stop()
            elif self._prepared:
                self._thread = get_ident()
                self._start_trace()
                self._stop()
        finally:
            if not profilers.running():  # else an interrupt came, and this is called again
                sessions.release(self)


@contextmanager
def _unsynchronized(profiler: Any) -> Iterator[None]:
    """Keep torch from synchronizing when ``profiler`` stops.

    It would initialize the GPU, fail in a capture, create a context on a current GPU that the program does not
    use, or never return.
    """
    device, profiler.use_device = profiler.use_device, None
    try:
        yield
    finally:
        profiler.use_device = device


def options_for(detail: Detail, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that ``detail`` stands for, replaced by those in ``options``.

    Raises:
        TypeError, ValueError: an option that torch.profiler does not know, or takes in another way.
    """
    from torch.profiler import profile

    options = profilers.custom_config(options)
    accepted = [name for name in inspect.signature(profile).parameters if name not in _OWN_ARGUMENTS]
    for name, value in options.items():
        if name not in accepted:
            raise TypeError(f'unknown option "{name}" (value {value!r}); {_hint(name, accepted)}')
    chosen = {**dict.fromkeys(_FULL if detail == "full" else (), True), **options}
    if hasattr(options.get("activities"), "__iter__"):
        chosen["activities"] = list(options["activities"])  # an iterator would serve one window only
    return chosen


def _hint(name: str, accepted: list[str]) -> str:
    if name in SCHEDULE_OPTIONS:
        return f"give a schedule: schedule=instrument.schedule({name}=...)"
    close = difflib.get_close_matches(name, [*accepted, *SCHEDULE_OPTIONS, *_PROFILE_ARGUMENTS], 1)
    return f'did you mean "{close[0]}"?' if close else f"torch.profiler takes {', '.join(accepted)}"


def check_values(given: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise now for options that torch would refuse in the middle of a run, or never.

    Args:
        given: the options as the user gave them, for the message.
        options: those of all windows.

    Raises:
        TypeError, ValueError: a value is refused.
    """
    for name in ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules", "acc_events"):
        value = given.get(name, False)
        if value is None or not hasattr(value, "__bool__"):
            raise TypeError(f'"{name}" must be True or False: {value!r}')
    callback = given.get("custom_trace_id_callback")
    if callback is not None and not callable(callback):
        raise TypeError(f'"custom_trace_id_callback" must be a function without arguments: {callback!r}')
    observer = given.get("execution_trace_observer")
    missing = [name for name in ("start", "stop", "cleanup") if not callable(getattr(observer, name, None))]
    if observer is not None and missing:
        raise TypeError(f'"execution_trace_observer" must have the methods start, stop and cleanup: {observer!r}')
    timeout = given.get("post_processing_timeout_s")
    if timeout is not None and (isinstance(timeout, (bool, str)) or not hasattr(timeout, "__float__")):
        raise TypeError(f'"post_processing_timeout_s" must be a number of seconds >= 0: {timeout!r}')
    try:
        if given:
            profilers.check_options(options)
    except Exception as error:  # torch's error does not name the argument
        if is_interrupt(error) or isinstance(error, (MemoryError, RecursionError)):
            raise
        shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(f"torch.profiler refuses {shown}: {error}") from error
