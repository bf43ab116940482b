"""The processes, threads, GPUs and rank that the events of an Nsight Systems report come from."""

from __future__ import annotations

from typing import Any

import numpy as np

from .lanes import map_unique, map_unique_pairs
from .nsight_tables import MISSING, NsightReport, minus_one_for_missing
from .table import Array
from .trace import Device, Thread

_PROCESS = ~0xFFFFFF  # of a global thread id, whose lowest 24 bits are the thread
_ID = 0xFFFFFFFF
_RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


class Origins:
    """Numbers the threads, processes and GPUs of a report.

    Attributes:
        devices: the GPUs that the report lists.
    """

    def __init__(self, report: NsightReport) -> None:
        self._report = report
        self._threads: dict[int, int] = {}
        # Rows without a process belong to the first one, which is usually the only one.
        self._processes = {MISSING: 0}
        self.devices = list(_gpus(report).values())
        self._sms = {device.id: device.sms for device in self.devices}
        seen = report.texts("TARGET_INFO_CUDA_DEVICE", "pid", "cudaId", "gpuId")
        self._gpu_of = {(pid, cuda): gpu for pid, cuda, gpu in seen if isinstance(gpu, int)}

    def threads_of(self, global_ids: Array) -> Array:
        """Return the numbers of threads; -1 for none."""
        return map_unique(global_ids, self._thread)

    def processes_of(self, global_ids: Array) -> Array:
        """Return the numbers of the processes of threads, or of processes."""
        return map_unique(np.where(global_ids == MISSING, MISSING, global_ids & _PROCESS), self._process)

    def correlations(self, global_ids: Array, numbers: Array) -> Array:
        """Return correlation ids that are unique among all processes: nsys counts per process."""
        return np.where(numbers == MISSING, -1, (self.processes_of(global_ids) << 32) + (numbers & _ID))

    def gpus_of(self, global_ids: Array, numbers: Array) -> Array:
        """Return the ids of GPUs, which a process that sees only some GPUs numbers differently."""
        if not self._gpu_of:
            return minus_one_for_missing(numbers)
        return map_unique_pairs(global_ids >> 24 & 0xFFFFFF, minus_one_for_missing(numbers), self._gpu)

    def sms_of(self, devices: Array) -> Array:
        """Return the number of multiprocessors of each GPU; 0 if unknown."""
        return map_unique(devices, lambda device: self._sms.get(device, 0))

    def threads(self) -> list[Thread]:
        """Return the threads, in the order of their numbers."""
        named = self._report.texts("ThreadNames", "globalTid", "nameId")
        names = {tid: name for tid, name in named if isinstance(name, int)}
        return [
            Thread(tid >> 24 & 0xFFFFFF, tid & 0xFFFFFF, self._report.string(names.get(tid, MISSING)))
            for tid in self._threads
        ]

    def process_names(self) -> dict[int, str]:
        """Return the names of the processes with threads in the trace, by process id."""
        own = {tid & _PROCESS for tid in self._threads}
        rows = self._report.texts("PROCESSES", "globalPid", "pid", "name")
        return {pid: str(name) for process, pid, name in rows if process in own}

    def _gpu(self, pid: int, number: int) -> int:
        return self._gpu_of.get((pid, number), number)

    def _thread(self, global_id: int) -> int:
        return -1 if global_id == MISSING else self._threads.setdefault(global_id, len(self._threads))

    def _process(self, global_id: int) -> int:
        return self._processes.setdefault(global_id, len(self._processes) - 1)


def metadata(report: NsightReport) -> dict[str, str]:
    """Return the metadata of the report, its export and the machine.

    The environment of the program is excluded, because it may hold secrets.
    """
    found: dict[str, str] = {}
    for table in ("TARGET_INFO_SYSTEM_ENV", "META_DATA_CAPTURE", "EXPORT_META_DATA", "META_DATA_EXPORT"):
        for name, value in report.texts(table, "name", "value"):
            if value is not None and "environment" not in str(name).lower():
                found[str(name)] = str(value)
    return found


def epoch_ns(report: NsightReport) -> int:
    """Return the start of the session, which is the 0 of all times, in ns since 1970; 0 if unknown."""
    for (start,) in report.texts("TARGET_INFO_SESSION_START_TIME", "utcEpochNs"):
        if isinstance(start, int):
            return start
    return 0


def rank_and_world(report: NsightReport) -> tuple[int | None, int | None]:
    """Return the rank and the number of ranks, from the variables of torchrun, MPI or Slurm."""
    rows = report.texts("TARGET_INFO_SYSTEM_ENV", "name", "value")
    text = next((str(value) for name, value in rows if name == "DeviceEnvironment"), "")
    environment = dict(line.partition("=")[::2] for line in text.split("\0"))
    for rank, world in _RANKS:
        if (number := _number(environment.get(rank))) is not None:
            return number, _number(environment.get(world))
    return None, None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else None


def _gpus(report: NsightReport) -> dict[int, Device]:
    columns = ("id", "name", "smCount", "maxWarpsPerSm", "threadsPerWarp", "totalMemory")
    found: dict[int, Device] = {}
    for id, name, sms, warps, threads, memory in report.texts("TARGET_INFO_GPU", *columns):
        if isinstance(id, int):
            found[id] = Device(id, str(name or ""), _count(sms), _count(warps) * _count(threads), _count(memory))
    return found


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
