"""Every private name of torch and nvtx that the library touches, each with what happens where it is missing."""

from __future__ import annotations

import functools
import gc
import inspect
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Protocol

from . import gpu, tools
from .interrupts import Suppressed
from .patch import Patch

# torch's profilers that turn its ranges into those of another tool
_TARGETS = {"emit_nvtx": "NVTX", "emit_itt": "ITT"}


def range_functions() -> tuple[Callable[..., Any], Callable[[Any], None]]:
    """Return functions that open and close a torch.profiler range of category ``user_annotation``.

    The first takes the name, and what the profiler shows as inputs where it records shapes.

    The autograd pair costs a third of `torch.profiler.record_function`, which is what older or newer
    versions of torch without it fall back to.
    """
    import torch

    enter = getattr(torch.autograd, "_record_function_with_args_enter", None)
    leave = getattr(torch.autograd, "_record_function_with_args_exit", None)
    if enter is not None and leave is not None:
        return enter, leave

    def enter_record_function(name: str, *_: Any) -> Any:
        record = torch.profiler.record_function(name)
        record.__enter__()
        return record

    return enter_record_function, lambda record: record.__exit__(None, None, None)


def profiler_running() -> bool:
    """Return whether a torch profiler records on this thread."""
    torch = sys.modules.get("torch")
    enabled = getattr(getattr(torch, "autograd", None), "_profiler_enabled", None)
    return bool(enabled()) if enabled is not None else False


def profiler_patches(started: Callable[[str, Any], None], stopped: Callable[[], None]) -> Iterator[Patch]:
    """Yield patches that call ``started(target, profiler)`` before a torch profiler starts, then ``stopped()``.

    ``target`` is what the profiler turns ranges into: "KINETO" (its own trace), "NVTX" or "ITT". There are no
    patches if this version of torch has no place for them: plain ``torch.profiler.profile`` blocks and windows
    then hold no regions.
    """
    from torch.autograd import profiler

    def starting(start: Callable[[], None]) -> Callable[[], None]:
        def run_on_profiler_start() -> None:
            caller = sys._getframe(1).f_locals.get("self")  # the profiler, in its __enter__
            started(_TARGETS.get(type(caller).__name__, "KINETO"), caller)
            start()

        return run_on_profiler_start

    def stopping(stop: Callable[[], None]) -> Callable[[], None]:
        def run_on_profiler_stop() -> None:
            try:
                stop()
            finally:
                stopped()

        return run_on_profiler_stop

    if hasattr(profiler, "_run_on_profiler_start") and hasattr(profiler, "_run_on_profiler_stop"):
        yield Patch(profiler, "_run_on_profiler_start", starting)
        yield Patch(profiler, "_run_on_profiler_stop", stopping)


def running_target() -> str | None:
    """Return the target, as `profiler_patches` names it, of the torch profiler that runs; None if none runs."""
    from torch.autograd import profiler

    if not getattr(profiler, "_is_profiler_enabled", False):
        return None
    kind = getattr(sys.modules["torch"]._C._autograd, "_profiler_type", None)
    return str(kind().name) if kind is not None else "KINETO"


def needs_nested_ranges(profiler: Any) -> bool:
    """Return whether ``profiler``, which starts, needs the ranges of a thread to end innermost first.

    It does with a GPU, whose lane shows the ranges, and where they become those of NVTX or ITT. Those in a profile
    of the CPU alone may end in any order. True as well where nothing is known of the profiler.
    """
    from torch.profiler import ProfilerActivity

    activities = getattr(profiler, "kineto_activities", None)
    return activities is None or bool(set(activities) - {ProfilerActivity.CPU})


def kineto_step() -> None:
    """Count a step where torch's own profiler would; several who count one step make one together."""
    tracker = getattr(sys.modules.get("torch.autograd.profiler"), "KinetoStepTracker", None)
    if tracker is not None:
        tracker.increment_step("ProfilerStep")


@contextmanager
def suppress_cycle_warning() -> Iterator[None]:
    """Keep torch from warning, as it prepares a profiler in the body, that this clears the events before.

    torch up to 2.11 also warns where there are none, and turned into an error that would cost the recording.
    """
    from torch.profiler import profiler

    module: Any = profiler
    shown = getattr(module, "_WARNINGS_SHOWN", None)
    if shown is None or isinstance(shown, _Everything):  # on another thread as well
        yield
        return
    module._WARNINGS_SHOWN = _Everything()
    try:
        yield
    finally:
        module._WARNINGS_SHOWN = shown


class _Everything(set[str]):
    def __contains__(self, _: object) -> bool:
        return True


def accumulate_events(profiler: Any, before: Any) -> None:
    """Have the events of ``profiler``, which made ``acc_events=True``, go on with those of the one ``before``."""
    profiler._old_function_events = before.function_events


def refuse_late(options: Mapping[str, Any]) -> None:
    """Raise what torch raises for ``options`` of `torch.profiler.profile` only once a recording begins.

    Asks for no device before the program uses one.
    """
    import torch
    from torch.autograd import profiler
    from torch.profiler import ProfilerActivity

    activities = options.get("activities")
    if activities == []:  # older versions take it for the default
        raise AssertionError("No valid profiler activities found")
    made = torch.profiler.profile(**{**options, "activities": _cpu() if activities is None else activities})
    for activity in made.activities:  # older versions check them later
        if not isinstance(activity, ProfilerActivity):
            raise TypeError(f"Expected ProfilerActivity, got {type(activity)}")
    known = inspect.signature(profiler.profile).parameters
    names = (
        "record_shapes", "with_flops", "profile_memory", "with_stack", "with_modules", "experimental_config",
        "post_processing_timeout_s", "activity_filters",
    )  # fmt: skip
    given = {name: getattr(made, name) for name in names if name in known and hasattr(made, name)}
    in_use = gpu.in_use() is not None
    backend = profiler.profile(
        use_cpu=ProfilerActivity.CPU in made.activities or gpu.supported(),
        use_device=made.use_device if in_use else None,
        use_kineto=True,
        **given,
    )
    backend.config()
    # Names of single activities are known to torch's C++ alone, whose first recording decides on the GPU.
    tried = (in_use or not gpu.supported()) and not (profiler_running() or profiler_enabled_somewhere())
    if given.get("activity_filters") and tried:
        backend.use_device = None  # it would be synchronized
        with backend:
            pass


def window_activities(given: Sequence[Any] | None) -> Sequence[Any]:
    """Return the activities of a window that begins now: without ``given`` ones, of what the program uses by now.

    torch's own default counts the devices, which initializes the driver.
    """
    import torch

    if given is not None:
        return given
    return _cpu() if gpu.in_use() is None else list(torch.profiler.supported_activities())


def _cpu() -> list[Any]:
    from torch.profiler import ProfilerActivity

    return [ProfilerActivity.CPU]


# Kineto writes these only if it was set up for GPUs: the labels of their lanes, which come before all events and
# need no GPU work, and the events that CUPTI and roctracer report.
_OF_GPUS = (b'"labels": "GPU ', *(b'"cat": "%b"' % kind for kind in (b"cuda_runtime", b"cuda_driver", b"kernel")))


def is_set_up_for_gpu(trace: Path) -> bool:
    """Return whether Kineto was set up for GPUs in the process that wrote ``trace``, even if no GPU work ran.

    It is set up once in a process: from torch 2.13 on for the activities of the first recording. True as well
    if the trace cannot be read.
    """
    with (
        Suppressed(OSError, ValueError),
        trace.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
    ):
        return any(text.find(word) >= 0 for word in _OF_GPUS)
    return True


class SessionObserver(Protocol):
    """What `on_session` calls, on the thread of the profiler."""

    def coming(self) -> None:
        """Some profiler of torch is about to begin."""

    def prepared(self, profiler: Any) -> bool | None:
        """A `torch.autograd.profiler.profile`, or None, is about to take the process's one Kineto session.

        Returns whether a session that is still on may be ended: nobody uses it any more.
        """

    def left(self) -> None:
        """The Kineto session is over."""

    def disabled(self) -> Any:
        """Somebody is about to disable whatever profiler is on; returns its result if that is done already."""


def session_patches(observer: SessionObserver) -> Iterator[Patch]:
    """Yield patches that call ``observer`` before any profiler of torch begins, and after a Kineto session ended.

    There are none if this version of torch has no place for them: overlapping profilers are then not noticed.
    """
    import torch
    from torch.autograd import profiler, profiler_legacy

    def preparing(prepare: Callable[[Any], None]) -> Callable[[Any], None]:
        def prepare_trace(profiler: Any) -> None:
            may_end = observer.prepared(profiler)
            try:
                prepare(profiler)
            except RuntimeError as error:
                if not (may_end and end_left_session(error)):
                    raise
                prepare(profiler)

        return prepare_trace

    def leaving(leave: Callable[..., Any]) -> Callable[..., Any]:
        def leave_trace(profiler: Any, *exception: Any) -> Any:
            try:
                return leave(profiler, *exception)
            finally:
                if not profiler_running():  # a KeyboardInterrupt may have come before it stopped
                    observer.left()

        return leave_trace

    def disabling(disable: Callable[[], Any]) -> Callable[[], Any]:
        def disable_profiler() -> Any:
            result = observer.disabled()
            return disable() if result is None else result

        return disable_profiler

    if not hasattr(profiler.profile, "_prepare_trace"):
        return
    yield Patch(profiler.profile, "_prepare_trace", preparing)
    yield Patch(profiler.profile, "__exit__", leaving)
    coming = functools.partial(_before, observer.coming)
    others: list[tuple[Any, str]] = [
        (kind, "__enter__") for kind in (profiler.emit_nvtx, profiler.emit_itt, profiler_legacy.profile)
    ]
    # Called by programs without a profiler object; torch's own code has references to them.
    others += [(torch.autograd, name) for name in ("_enable_profiler", "_enable_profiler_legacy")]
    yield from (Patch(owner, name, coming) for owner, name in others if hasattr(owner, name))
    if hasattr(torch.autograd, "_prepare_profiler"):
        taken = functools.partial(_before, functools.partial(observer.prepared, None))
        yield Patch(torch.autograd, "_prepare_profiler", taken)
    if hasattr(torch.autograd, "_disable_profiler"):
        yield Patch(torch.autograd, "_disable_profiler", disabling)


def prepared_profilers() -> list[Any]:
    """Return the ``torch.autograd.profiler.profile`` objects that have prepared; 50 ms for a million objects."""
    from torch.autograd import profiler

    kind = profiler.profile
    return [
        known
        for known in gc.get_objects()
        if type(known) is kind and known.entered and known.kineto_results is None
    ]


def end_left_session(error: RuntimeError) -> bool:
    """End a Kineto session that was left without its stop, if ``error`` says that one is in the way of the next.

    Torch 2.13 discards such a session when the next profiler prepares. Torch 2.11 first disables the profiler of
    this thread, and raises where that one is gone, again for every later profiler of the process. A profiler that
    is enabled and disabled takes the session over and ends it; where there is no session, that would crash.

    Returns:
        Whether it was ended: preparing again succeeds.
    """
    import torch
    from torch.autograd import profiler

    if "Can't disable Kineto profiler when it's not running" not in str(error):
        return False
    functions: Any = torch._C._autograd  # the C functions: torch's Python names may be patched
    with Suppressed(Exception):
        empty = profiler.profile(use_cpu=True)  # of the CPU alone: asks for no GPU
        try:
            functions._enable_profiler(empty.config(), empty.kineto_activities)
        finally:
            if profiler_running():
                functions._disable_profiler()
        return True
    return False


def _before(first: Callable[[], object], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        first()
        return original(*args, **kwargs)

    return call


def note_stop() -> None:
    """Tell torch, and those who follow it by `on_profiler`, that the profiler of this thread is off, if it is.

    torch keeps one note for all threads: this is for when no profiler of another thread records.

    Torch notes the start just before it enables a profiler, and the stop just after it disabled it: an error or an
    interrupt in between leaves it noted as on.
    """
    if profiler_enabled_somewhere() and not profiler_running():
        from torch.autograd import profiler

        profiler._run_on_profiler_stop()


def profiler_enabled_somewhere() -> bool:
    """Return whether a torch profiler records on any thread, as far as torch knows."""
    return bool(getattr(sys.modules.get("torch.autograd.profiler"), "_is_profiler_enabled", False))


def frame_evaluation() -> Callable[[Any], Any] | None:
    """Return what sets by what torch.compile evaluates the frames of this thread, and returns what did so before.

    None turns it off. The function is None where this version of torch has none.
    """
    try:
        from torch._C._dynamo.eval_frame import set_eval_frame
    except ImportError:
        return None
    setter: Callable[[Any], Any] = set_eval_frame
    return setter


_EVAL_FRAME = "torch/_dynamo/eval_frame.py".replace("/", os.sep)


def in_compiled_call(frame: FrameType | None) -> bool:
    """Return whether ``frame`` is in a call of a function that torch.compile returned."""
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("compile_wrapper", "_fn") and code.co_filename.endswith(_EVAL_FRAME):
            return True
        frame = frame.f_back
    return False


def compiled_call_end() -> tuple[Any, str] | None:
    """Return what such a call calls at its end, as its owner and name, once torch.compile is imported."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    return (module, "_maybe_set_eval_frame") if hasattr(module, "_maybe_set_eval_frame") else None


# What calls operators, custom functions, backward passes and compiled functions
_CALLERS = tuple(
    f"torch/{path}".replace("/", os.sep)
    for path in ("autograd/function.py", "autograd/graph.py", "_ops.py", "_dynamo/eval_frame.py")
)


def in_operator() -> bool:
    """Return whether this thread is inside an operator, backward node or compiled function of torch's.

    The profiler's range of it is opened and closed in C++.
    """
    if in_backward():
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__torch_dispatch__" or code.co_filename.endswith(_CALLERS):
            return True
        frame = frame.f_back
    return False


@contextmanager
def past_modes() -> Iterator[None]:
    """Keep operators called in the body from ``__torch_function__`` and ``__torch_dispatch__`` of the program."""
    import torch

    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        yield


def leave_recording() -> Any:
    """Take the profiler that records on this thread off without reading what it recorded, which is lost.

    Returns:
        What keeps its memory: the ranges that are open now are written to when they close. None where this
        version of torch has no way to do it; the profiler stays on.
    """
    import torch
    from torch.autograd import profiler

    options = getattr(torch._C._autograd, "_ProfilerDisableOptions", None)
    if options is None:
        return None
    operators: Any = torch.ops.profiler
    bindings: Any = torch._C._autograd
    with past_modes():
        # A callback keeps the state of the thread that added it, in which the profiler's memory is.
        future: Any = torch.futures.Future()
        record = operators._record_function_enter_new("", None)
        operators._call_end_callbacks_on_jit_fut._RecordFunction(record, future)
        operators._record_function_exit._RecordFunction(record)
    bindings._disable_profiler_legacy(options(True, False))  # no reading
    profiler._run_on_profiler_stop()
    return future


def record_functions() -> list[Any]:
    """Return each `torch.profiler.record_function` of the process; costs 90 ms for 350,000 objects."""
    from torch.autograd.profiler import record_function

    kinds = (record_function, *record_function.__subclasses__())
    return [found for kind in kinds for found in gc.get_referrers(kind) if isinstance(found, record_function)]


def end_record_functions(found: Iterable[Any]) -> None:
    """End those of ``found`` that are open; torch ignores their second end. For while no profiler records.

    torch crashes on one that is open when its recording stops and is closed in the next.
    """
    import torch

    leave = torch.ops.profiler._record_function_exit._RecordFunction
    with past_modes():
        for context in found:
            if context.record is not None:
                leave(context.record)


def autograd_functions() -> tuple[Callable[[], int], Callable[[], int], Callable[[Any], None]] | None:
    """Return functions for the number of the next autograd node, for that of the backward pass, and for its end.

    The third registers a callback for the end of the backward pass. Each thread numbers nodes in the order in
    which its forward makes them; backward runs those that are ready in the reverse order. Outside of a backward
    pass, the number of the pass is -1.

    Returns:
        The functions, or None if this version of torch lacks one of them: there are no backward regions then.
    """
    import torch

    number = getattr(torch.autograd, "_get_sequence_nr", None)
    task = getattr(torch._C, "_current_graph_task_id", None)
    engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
    if number is None or task is None or not hasattr(engine, "queue_callback"):
        return None
    return number, task, engine.queue_callback


def torch_function_controls() -> tuple[Callable[[], bool], Callable[[], AbstractContextManager[None]]]:
    """Return a function for whether a ``TorchFunctionMode`` is active, and a context manager without overrides.

    Without these names of torch every mode is taken as active, and nothing keeps ``__torch_function__`` from
    seeing what the library does.
    """
    import torch

    active = getattr(torch._C, "_is_torch_function_mode_enabled", None)
    return active or (lambda: True), getattr(torch._C, "DisableTorchFunction", nullcontext)


def in_backward() -> bool:
    """Return whether a backward pass runs on this thread."""
    task = getattr(getattr(sys.modules.get("torch"), "_C", None), "_current_graph_task_id", None)
    return task is not None and task() != -1


def autograd_node() -> str | None:
    """Return the name of the autograd node that runs on this thread, as "MulBackward0"; None outside of any."""
    node = getattr(getattr(sys.modules.get("torch"), "_C", None), "_current_autograd_node", None)
    running = node() if node is not None else None
    return running.name() if running is not None else None


def backward_runner() -> tuple[Any, str] | None:
    """Return the owner and the name of the function that runs every backward pass; None where it is not there."""
    import torch

    return (torch.autograd, "_engine_run_backward") if hasattr(torch.autograd, "_engine_run_backward") else None


def skip_code() -> Callable[[CodeType], None] | None:
    """Return a function that has torch.compile leave a function's code alone, but where it is inlined.

    None where it is missing: code may then be compiled that is not meant to be.
    """
    try:
        from torch._C._dynamo import eval_frame
    except ImportError:
        return None
    if hasattr(eval_frame, "skip_code"):  # torch 2.6
        skip: Callable[[CodeType], None] = eval_frame.skip_code
        return skip
    try:
        action = eval_frame._FrameAction
        alone = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
        choose = eval_frame.set_code_exec_strategy
    except (AttributeError, TypeError):
        return None
    return lambda code: choose(code, alone)


def tensor_text() -> tuple[Any, str] | None:
    """Return the owner and the name of the function that makes the text of a tensor; None where it is not there.

    Each value that it reads is then a wait of its own. `Tensor.__repr__` itself is not to be replaced: the
    compiler would look into what is put there.
    """
    import torch

    module = getattr(torch, "_tensor_str", None)
    return (module, "_str") if hasattr(module, "_str") else None


def sync_callbacks() -> tuple[dict[str, list[Any]], Callable[[], None]] | None:
    """Return the lists of what torch calls before the CPU waits for a GPU, and what makes it call them.

    The lists are those for a "stream", an "event" and a "device". None where this version of torch has no such
    hook: a wait is then only heard of when it is over.
    """
    import torch

    activate = getattr(torch._C, "_activate_gpu_trace", None)
    try:
        from torch.cuda import _gpu_trace as trace

        registries: dict[str, Any] = {
            "stream": trace.StreamSynchronizationCallbacks,
            "event": trace.EventSynchronizationCallbacks,
            "device": trace.DeviceSynchronizationCallbacks,
        }
        lists = {what: registry.callback_list for what, registry in registries.items()}
    except (ImportError, AttributeError):
        return None
    return (lists, activate) if activate is not None else None


class _OneCall:
    """A function that is called once at most, from whatever thread, and not after `cancel`."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._calls = [call]

    @property
    def over(self) -> bool:
        return not self._calls

    def __call__(self) -> None:
        try:
            call = self._calls.pop()  # of two threads, one has it
        except IndexError:
            return
        call()

    def cancel(self) -> None:
        self._calls.clear()


def when_initialized(call: Callable[[], None]) -> Callable[[], None]:
    """Call ``call`` as the program initializes CUDA, on that thread; at once where it has.

    Neither this nor the returned function waits for a thread that is initializing CUDA. ``call`` is not called if
    that thread has already run its queue, or if this version of torch has no queue.

    Returns:
        A function that cancels it: ``call`` is not called after that.
    """
    import torch

    queued: list[Any] | None = getattr(torch.cuda, "_queued_calls", None)
    lock = getattr(torch.cuda, "_initialization_lock", None)
    once = _OneCall(call)
    if gpu.initialized("cuda") is None and queued is not None:
        queued.append((once, []))  # not by `_lazy_call`: torch has its lock for as long as it initializes
    if gpu.initialized("cuda") is not None:
        once()

    def forget() -> None:
        once.cancel()
        if queued is None or lock is None or not lock.acquire(blocking=False):
            return  # torch runs the queue now, which it does once
        try:
            for number in reversed(range(len(queued))):  # others append meanwhile
                entry = queued[number][0]
                if isinstance(entry, _OneCall) and entry.over:
                    del queued[number]
        finally:
            lock.release()

    return forget


def is_fake(tensor: Any) -> bool:
    """Return whether ``tensor`` has a shape and a device, and no data."""
    fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    return fake is not None and isinstance(tensor, fake)


def parse_to(*args: Any, **kwargs: Any) -> tuple[Any, Any, bool, Any]:
    """Return the device, type, ``non_blocking`` and memory format that the arguments of `Module.to` mean.

    `Module.to` calls the same function, so it needs no fallback.
    """
    import torch

    parsed: tuple[Any, Any, bool, Any] = torch._C._nn._parse_to(*args, **kwargs)
    return parsed


def forget_warnings() -> None:
    """Make Python forget which warnings it showed; where it cannot be told, it shows none of them again."""
    import warnings

    forget = getattr(warnings, "_filters_mutated", None) or getattr(warnings, "_filters_mutated_lock_held", None)
    if forget is not None:
        forget()


def function_modes() -> list[Any]:
    """Return the torch function modes that are on, outermost first; none where torch does not tell."""
    from torch import overrides

    stack = getattr(overrides, "_get_current_function_mode_stack", None)
    return list(stack()) if stack is not None else []


def before_node() -> Callable[[Any, Callable[[Any], None]], Any]:
    """Return a function that has another one called before an autograd node runs.

    `Node.register_prehook` makes a handle for each hook. What `Tensor.register_hook` ends in makes none and costs
    a third: it takes the hooks of a tensor, here of one that is there for that alone.
    """
    import torch
    from torch.autograd.graph import Node

    if not hasattr(Node, "_register_hook_dict"):
        return lambda node, hook: node.register_prehook(hook)

    class Here(threading.local):
        def __init__(self) -> None:
            with past_modes():  # selective checkpointing keeps a list of the operators of its forward
                self.carrier = torch.empty(0, device="cpu")  # whatever the default is

    here = Here()

    def attach(node: Any, hook: Callable[[Any], None]) -> None:
        carrier = here.carrier
        carrier._backward_hooks = {0: hook}
        node._register_hook_dict(carrier)

    return attach


def compiled_module() -> Any:
    """Return the class of what ``torch.compile(module)`` returns, or None while nothing was compiled."""
    return getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)


def compilers() -> list[tuple[Any, str]]:
    """Return the context of each compilation by Dynamo, as its owner and name, once that is imported."""
    callbacks = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    return [(callbacks, "install_callbacks")] if hasattr(callbacks, "install_callbacks") else []


def scripters() -> list[tuple[Any, str]]:
    """Return what is behind `torch.jit.script` and `torch.jit.trace`, as its owner and name."""
    return _owners("create_script_module", ("torch.jit._recursive",))


def graph_makers() -> list[tuple[Any, str]]:
    """Return what makes CUDA graphs of modules, as far as it is imported, as owners and names of attributes.

    It refuses modules that have hooks. Each place that has it under a name is replaced for itself.
    """
    return _owners("make_graphed_callables", _GRAPH_MAKERS)


_GRAPH_MAKERS = (
    "torch.cuda",
    "torch.cuda.graphs",
    "torch.xpu",
    "torch.xpu.graphs",
    "transformer_engine.pytorch",
    "transformer_engine.pytorch.graph",
)


def _owners(name: str, modules: Iterable[str]) -> list[tuple[Any, str]]:
    found = [sys.modules.get(module) for module in modules]
    return [(module, name) for module in found if hasattr(module, name)]


def graphs_compiled() -> bool:
    """Return whether torch.compile made any graph in this process."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters.get("stats", {}).get("unique_graphs"))


def collectives() -> tuple[Any, dict[str, str]]:
    """Return the class of process groups, and by its methods the names of the functions that end up there.

    All that torch.distributed starts from Python goes through them. No methods where it is missing.
    """
    import torch

    group = getattr(torch.distributed, "ProcessGroup", None)
    return group, {method: name for method, name in _COLLECTIVES.items() if method in vars(group or object)}


_PATCHES = 6  # of one method, each of which is a frame between torch's and the one that asks

_COLLECTIVES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier",
}


def clipping() -> Callable[[FrameType], str | None] | None:
    """Return a function that tells which function of torch's for clipping gradients runs in a frame.

    They share the code of the decorator that puts them under `torch.no_grad`. None where that is not so.
    """
    from torch.nn.utils import clip_grad_norm_

    code = clip_grad_norm_.__code__
    if "func" not in code.co_freevars:
        return None

    def name(frame: FrameType) -> str | None:
        if frame.f_code is not code:
            return None
        name: str = frame.f_locals["func"].__name__
        return name if name in ("clip_grad_norm_", "clip_grad_value_") else None

    return name


def index_sampler(loader: Any) -> Any:
    """Return what a DataLoader takes the indices of a batch from, and so does each iterator over it."""
    return getattr(loader, "_index_sampler", None)


def caller_in(frame: FrameType, module: str) -> Any:
    """Return the object with a method in torch's ``module`` that runs in ``frame``, or just below it."""
    below: FrameType | None = frame
    for _ in range(_PATCHES):
        if below is None:
            return None
        if below.f_globals.get("__name__") == module:
            return below.f_locals.get("self")
        below = below.f_back
    return None


def with_index(device: Any) -> Any:
    """Return ``device`` with the index of the one that is meant where it has none, as "cuda"."""
    import torch

    module: Any = getattr(torch, device.type, None)
    if device.index is not None or not hasattr(module, "is_initialized"):
        return device
    return torch.device(device.type, module.current_device() if gpu.initialized(device.type) else 0)


def nvtx_domain(name: str) -> Any:
    """Return the `nvtx.Domain` called ``name``, or None when no tool listens.

    nvtx asks the tool whether it listens. Nsight Systems up to 2024.2 does not know the question,
    which reads as "no": every range would be lost. There, the domain is built around that check.
    """
    import nvtx

    domain = nvtx.get_domain(name)
    if type(domain).__name__ != "DummyDomain":
        return domain
    if not tools.nvtx_injected():
        return None
    from nvtx._lib import lib

    try:
        domain = object.__new__(lib.Domain)
        domain.handle = lib.DomainHandle(name)
        domain.__init__(name)
    except (AttributeError, TypeError):
        return None
    return domain


def when_imported(name: str, call: Callable[[Any], None]) -> None:
    """Call ``call(module)`` once the module ``name`` is imported; import nothing now."""
    import wrapt

    wrapt.register_post_import_hook(call, name)


COMPILED_CALL = "_compiled_call_impl"
"""The attribute of a module that torch calls instead of ``_call_impl`` where it is not None."""


def has_compiled_call() -> bool:
    """Return whether this version of torch has that attribute: without it no call of a module can be followed."""
    from torch import nn

    return COMPILED_CALL in vars(nn.Module)


def called_compiled(module: Any) -> Any:
    """Return what ``torch.compile(module)`` returned, if this thread is in a call of that; else None."""
    kind = compiled_module()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and kind is not None:
        if frame.f_code.co_name == "_wrapped_call_impl":
            called = frame.f_locals.get("self")
            if isinstance(called, kind) and called._orig_mod is module:
                return called
        frame = frame.f_back
    return None


def compiled_in_place() -> list[Any]:
    """Return the modules that ``module.compile()`` compiled; 50 ms for a million objects, if there can be any."""
    from torch import nn

    if "torch._dynamo" not in sys.modules:
        return []
    modules = [known for known in gc.get_objects() if issubclass(type(known), nn.Module)]
    return [module for module in modules if vars(module).get(COMPILED_CALL) is not None]
