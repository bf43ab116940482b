"""Snapshots of the process state that a program can see, to be compared before and after."""

from __future__ import annotations

import builtins
import decimal
import gc
import hashlib
import locale
import logging
import os
import pickle
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

Snapshot = dict[str, Any]


def snapshot() -> Snapshot:
    """Return all state of the process by name; values can be compared."""
    return {**_random(), **_python(), **_logging(), **_system(), **_torch(), **_numpy()}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the changes as lines."""
    return [
        f"{name}: {before.get(name)!r} -> {after.get(name)!r}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]


def seed() -> None:
    """Seed all random number generators."""
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)


def _hash(value: Any) -> str:
    return hashlib.sha256(pickle.dumps(value)).hexdigest()[:12]


def _random() -> Snapshot:
    states = {
        "random": _hash(random.getstate()),
        "numpy.random": _hash(numpy.random.get_state()),
        "torch random": _hash(torch.get_rng_state().tolist()),
    }
    if torch.cuda.is_available():
        states["torch.cuda random"] = _hash([state.tolist() for state in torch.cuda.get_rng_state_all()])
    return states


def _python() -> Snapshot:
    umask = os.umask(0)
    os.umask(umask)
    return {
        "warnings.filters": list(warnings.filters),
        "warnings.showwarning": warnings.showwarning,
        "locale": locale.setlocale(locale.LC_ALL),
        "switch interval": sys.getswitchinterval(),
        "recursion limit": sys.getrecursionlimit(),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.get_freeze_count(), list(gc.callbacks)),
        "environment": dict(os.environ),
        "cwd": Path.cwd(),
        "umask": umask,
        "sys.path": list(sys.path),
        "sys.argv": list(sys.argv),
        "sys.meta_path": list(sys.meta_path),
        "sys.path_hooks": list(sys.path_hooks),
        "streams": (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__),
        "hooks": (sys.excepthook, sys.unraisablehook, sys.displayhook, sys.breakpointhook),
        "threading hooks": (threading.excepthook, threading.gettrace(), threading.getprofile()),
        "trace": (sys.gettrace(), sys.getprofile()),
        "builtins": {name: id(value) for name, value in vars(builtins).items() if name != "_"},
        "decimal": repr(decimal.getcontext()),
        "tempdir": tempfile.tempdir,
        "socket timeout": socket.getdefaulttimeout(),
        "stack size": threading.stack_size(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }


def _logging() -> Snapshot:
    def settings_of(logger: logging.Logger) -> tuple[Any, ...]:
        return logger.level, list(logger.handlers), list(logger.filters), logger.propagate, logger.disabled

    loggers = {name: item for name, item in logging.root.manager.loggerDict.items() if "instrument" not in name}
    changed = {  # not those with default settings
        name: settings_of(item)
        for name, item in sorted(loggers.items())
        if isinstance(item, logging.Logger) and settings_of(item) != (0, [], [], True, False)
    }
    return {
        "logging": (logging.root.manager.disable, logging.raiseExceptions, logging.lastResort),
        "logging names": (logging.getLoggerClass(), logging.getLogRecordFactory(), logging.getLevelName(10)),
        "root logger": settings_of(logging.root),
        "loggers": changed,
    }


def _system() -> Snapshot:
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    links = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]  # noqa: PTH208
    return {
        "signals": {
            number.name: signal.getsignal(number) for number in signal.valid_signals() if hasattr(number, "name")
        },
        "signal mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "signal wakeup": wakeup,
        "timers": (signal.getitimer(signal.ITIMER_REAL), signal.getitimer(signal.ITIMER_PROF)),
        "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT_" in name],
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "affinity": os.sched_getaffinity(0),
        "time zone": time.tzname,
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        "sockets": sum("socket:" in link for link in links),
    }


def _numpy() -> Snapshot:
    return {"numpy errors": numpy.geterr(), "numpy print": repr(numpy.get_printoptions())}


def _torch() -> Snapshot:
    shown = getattr(torch.profiler.profiler, "_WARNINGS_SHOWN", set())
    return {
        "matmul precision": torch.get_float32_matmul_precision(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "cudnn": (
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
        ),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "defaults": (torch.get_default_dtype(), str(torch.get_default_device())),
        "torch threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "torch print": repr(torch._tensor_str.PRINT_OPTS),
        "device": torch.cuda.current_device() if torch.cuda.is_initialized() else None,
        "sync debug mode": torch.cuda.get_sync_debug_mode() if torch.cuda.is_initialized() else None,
        "cuda initialized": torch.cuda.is_initialized(),
        "warn always": torch.is_warn_always_enabled(),
        "profiler": torch.autograd._profiler_enabled(),
        "profiler's warnings": (type(shown), sorted(shown)),
    }
