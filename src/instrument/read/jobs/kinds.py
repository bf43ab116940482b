"""The kinds of files: how each is recognized, what reads it and what it holds, or what to do with it instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ...base.errors import TraceError

if TYPE_CHECKING:
    from ..tables.trace import Trace

Fits = Callable[[Path, bytes], object]
Read = Callable[[Path], "list[Trace]"]


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        name: the tool that writes it; of a kind that is not read, what the file is.
        suffixes: how the names of such files end.
        fits: whether a file with these first bytes, unpacked if it is gzip, is of this kind; None if only its name
            says so.
        read: returns its trace, or the traces of several ranks; None if it is not read.
        holds: what a trace has of it; of a kind that is not read, what to do.
        sums: whether it has sums of GPU time by name, and no timeline.
    """

    name: str
    suffixes: tuple[str, ...]
    fits: Fits | None
    read: Read | None
    holds: str
    sums: bool = False

    @property
    def text(self) -> str:
        """What a file of this kind is and, as it is not read, what to do with it."""
        return f"it is {self.name}{': ' * bool(self.holds)}{self.holds}"


def _begins(pattern: bytes, within: int = 4096) -> Fits:
    """Return what tells whether a file begins so, by its first ``within`` bytes."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda _, head: compiled.match(head, 0, within)


def _one(place: str) -> Read:
    """Return what reads one trace; the module of the function is imported when a file is read."""
    module, _, function = place.rpartition(".")
    return lambda path: [getattr(import_module(f"..{module}", __package__), function)(path)]


def _read_chrome(path: Path) -> list[Trace]:
    from ..kineto.kineto import read_kineto_ranks
    from .progress import progress_bar

    with progress_bar(path) as advance:
        return read_kineto_ranks(path, advance)


def _is_ascend(path: Path, head: bytes) -> bool:
    if not head.lstrip().startswith(b"["):
        return False
    from ..profilers.ascend import names_ascend

    return names_ascend(path)


def _read_ascend(path: Path) -> list[Trace]:
    from ..profilers.ascend import read_ascend

    try:
        return [read_ascend(path)]
    except TraceError:  # a damaged file, whose other events can be read
        return _read_chrome(path)


def _read_database(path: Path) -> list[Trace]:
    from ..profilers.database import open_database

    with open_database(path) as database:
        query = "SELECT count(*) FROM sqlite_master WHERE name LIKE 'rocpd%'"
        (rocpd_tables,) = database.execute(query).fetchone()
    return _one("profilers.rocpd.read_rocpd" if rocpd_tables else "profilers.nsight.read_nsight")(path)


def _is_compile_log(_: Path, head: bytes) -> bool:
    from ..profilers.compile_log import is_compile_log

    return is_compile_log(head)


CHROME = Kind(
    "torch.profiler, since 2021; in its format JAX, Composer, Horovod, VizTracer, ONNX Runtime, `ray timeline`",
    (".json", ".json.gz"),
    None,
    _read_chrome,
    "operators, regions, steps, Python frames, calls of the runtime, GPU work, memory, counters, also if damaged; "
    "the events of other tools as regions",
)
"""What any other JSON is taken for."""

READ = (
    CHROME,
    Kind(
        "Nsight Systems; rocprofv3",
        (".sqlite", ".db"),
        _begins(rb"SQLite format 3\0"),
        _read_database,
        "ranges of NVTX and rocTX, calls of the runtime, GPU work, counters",
    ),
    Kind(
        "Nsight Systems, where `nsys` is installed",
        (".nsys-rep", ".qdrep"),
        None,
        _one("profilers.nsight.read_nsight"),
        "as the `.sqlite` that `nsys export --type sqlite` writes",
    ),
    Kind(
        "rocprofv3",
        (".json", ".json.gz"),
        _begins(rb'(?=.*"rocprofiler-sdk-tool")(?!.*"traceEvents")', 1 << 16),
        _one("profilers.rocprof.read_rocprof"),
        "ranges of rocTX, calls of the runtime, GPU work, counters",
    ),
    Kind(
        "rocprofv3",
        ("_kernel_trace.csv",),
        _begins(rb'(?:"Guid",)?"(?:Kind|Domain)",[^\n]*"Start_Timestamp"'),
        _one("profilers.rocprof_csv.read_rocprof_csv"),
        "ranges of rocTX, calls of the runtime and GPU work, of all files with this beginning of the name",
    ),
    Kind(
        "JAX and TensorFlow, with protobuf (`pip install 'torch-instrument[xplane]'`)",
        (".xplane.pb",),
        _begins(
            rb"\n[\x80-\xff]{0,4}[\0-\x7f](?:\x08[\x80-\xff]{0,9}[\0-\x7f])?\x12[\0-\x7f]"
            rb"(?:/host:|/device:|Task |Host )"
        ),
        _one("profilers.xplane.read_xplane"),
        "annotations, steps, Python frames, calls of the runtime, operations on the CPU, work of GPUs and TPUs",
    ),
    Kind(
        "torch.profiler, since 2.14, rocprofv3 and Triton's Proton for Perfetto; with protobuf, as above",
        (".pftrace", ".pftrace.gz", ".perfetto-trace"),
        # a packet with one of the fields that begin packets, which no text has here
        _begins(
            rb"\n[\x80-\xff]{0,4}[\0-\x7f](?:[\x32\x38\x40\x50\x58\x62\x68]|[\x80-\xff][\x01-\x0f])"
            rb"(?=.{0,400}[\0-\x08])"
        ),
        _one("profilers.perfetto.read_perfetto"),
        "the slices of the program and of the GPU; render stages, which are torch's GPU work; torch's counters",
    ),
    Kind(
        "TensorRT's `trtexec --exportTimes`",
        (".json",),
        _begins(rb"\s*\[\s*\{\s*\"start(?:Enq|H2d|In)Ms\"\s*:"),
        _one("profilers.trtexec.read_trtexec_times"),
        "queries as steps, with their calls, copies and work",
    ),
    Kind("torch_npu", (".json",), _is_ascend, _read_ascend, "operators, regions, calls of CANN, work of the NPU"),
)
"""The kinds of which a `Trace` is made, as the documentation lists them."""

_SNAPSHOT = "a pickle, such as a memory snapshot, which instrument memory reads"
IS_PICKLE = f"it is {_SNAPSHOT}"
"""The error for a pickle that is given where a trace is wanted."""

_PICKLE = re.compile(rb"\x80[\x02-\x05]")  # and its protocol
_POINTER = "fetches the file"
_DOWNLOAD = "download the file itself"


def _other(name: str, advice: str, begins: bytes | None, *suffixes: str, sums: bool = False) -> Kind:
    return Kind(name, suffixes, None if begins is None else _begins(begins), None, advice, sums)


OTHERS = (
    Kind(
        "a log of torch.compile",
        (),
        _is_compile_log,
        None,
        "give it beside a trace, instrument diagnose TRACE --compile-log LOG",
    ),
    _other(
        "a checkpoint, as older versions of torch.save write it",
        "torch.load reads it",
        rb"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\.",
    ),
    _other(_SNAPSHOT, "", _PICKLE.pattern),
    _other(
        "a file of safetensors, such as a checkpoint", "safetensors reads it", rb".{5}\0\0\0\{\"[^{}]*(?:\":\s*\{)"
    ),
    _other("a model in GGUF, and no trace", "", rb"GGUF"),
    _other("compressed with LZ4", "unpack it first, with lz4 -d", rb"\x04\x22\x4d\x18"),
    _other("compressed with 7-Zip", "unpack it first, with 7z x", rb"7z\xbc\xaf\x27\x1c"),
    _other("compressed with RAR", "unpack it first, with unrar x", rb"Rar!\x1a\x07"),
    _other(
        "a pointer of Git LFS",
        f"git lfs pull {_POINTER}",
        rb"version https://git-lfs\.github\.com/spec/",
    ),
    _other(
        "a pointer of git-annex",
        f"git annex get {_POINTER}",
        rb"\s*(?:(?:\.\./)*\.git)?/annex/objects/",
    ),
    _other("a pointer of DVC", f"dvc pull {_POINTER}", rb"outs:\s*\n- (?:md5|hash|path|size): "),
    _other(
        "a page, such as instrument diagnose --html writes",
        "give its trace, or open it in a browser",
        rb"<!doctype html>.{0,800}<title>[^<]*\.(?:json|sqlite|pickle)",
    ),
    _other(
        "an HTML page, such as a login or an error page",
        _DOWNLOAD,
        rb"\s*(?i:<!doctype html|<html|<head|<body)",
    ),
    _other("XML, such as the error message of a store", _DOWNLOAD, rb"\s*<\?xml|\s*<Error>"),
    _other(
        "a diagnosis",
        "give its trace instead",
        rb"\{\s*\"version\": \d+,\s*\"path\": [^\n]*(?:\n *)?\"verdict\": ",
    ),
    _other(
        "a file that a black box wrote beside a trace, with the times of the steps",
        "give the trace instead",
        rb"\{\s*\"step\": \d+,\s*\"usual_ns\": ",
    ),
    _other("the manifest of a run", "give the folder that it is in", rb"\{\"run\": \"[^\"]*\", \"rank\": "),
    _other("a notebook, and no trace", "", rb"\{\s*\"cells\": "),
    _other(
        "a comparison, as instrument compare --json writes it",
        "give the traces",
        rb"\{\s*\"verdict\": \"[^\"]*\",\s*\"before\": ",
    ),
    _other(
        "a report of Nsight Compute, which measures single kernels and has no timeline",
        "open it with ncu-ui, or with ncu --import",
        rb"NVR\0",
        ".ncu-rep",
    ),
    _other(
        "a raw recording of Nsight Systems",
        "QdstrmImporter of Nsight Systems makes a report of it",
        None,
        ".qdstrm",
    ),
    _other("a NumPy array, and no trace", "numpy.load reads it", rb"\x93NUMPY"),
    _other(
        "a Parquet file, such as Trace.to_parquet writes",
        "pandas.read_parquet reads it",
        rb"PAR1",
    ),
    _other("an Arrow file, and no trace", "pyarrow.feather.read_table reads it", rb"ARROW1"),
    _other("an HDF5 file, and no trace", "h5py reads it", rb"\x89HDF\r\n"),
    _other(
        "a picture, and no trace", "give the file that it was made of", rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF....WEBP"
    ),
    _other("a PDF, and no trace", "give the file that it was made of", rb"%PDF"),
    _other("a program, and no trace", "instrument run -- python train.py records one", rb"\x7fELF|MZ.{58}"),
    _other("a recording of Linux perf, which has no GPU work", "perf report reads it", rb"PERFILE2"),
    _other(
        "a file of TensorBoard's scalars, and no trace",
        "the traces are the .pt.trace.json files beside it",
        None,
        ".tfevents",
    ),
    _other(
        "a printed table of torch.profiler, which has sums and no timeline",
        "give the trace, as prof.export_chrome_trace writes it",
        rb"\s*-{9,}  -{9}[- \n]*\n *Name\s",
    ),
    _other(
        "an execution trace (PyTorch ET, Chakra), which has operators and no times",
        "give the trace that torch.profiler wrote in the same run",
        rb"\s*\{(?=.{0,2000}\"nodes\"\s*:).{0,2000}?\"schema\"\s*:\s*\"\d",
        ".et",
    ),
    _other(
        "a Hatchet profile, as Triton's Proton writes, which has sums and no timeline",
        'proton-viewer shows it; Proton writes a trace with data="trace"',
        rb"\s*\[\s*\{\s*\"(?:children|frame|metrics)\"\s*:",
        ".hatchet",
        sums=True,
    ),
    _other(
        "a profile of TensorRT, which has times of layers and no timeline",
        "record the program with nsys profile",
        rb"\s*\[\s*\{\s*\"(?:count\"\s*:\s*\d+\s*\}|name\"[^{}]{0,2000}\"(?:timeMs|averageMs)\")",
        sums=True,
    ),
    _other(
        "a table of sums of rocprofv3 --stats, which has no timeline",
        "give the kernel_trace.csv beside it",
        rb"\"Name\",\"Calls\",\"TotalDurationNs\"",
    ),
    _other(
        "a profile for speedscope, which has no GPU work",
        "www.speedscope.app shows it",
        rb"\s*\{.{0,500}?speedscope\.app/file-format-schema",
    ),
)
"""The kinds that no `Trace` is made of; the first that fits decides."""

SUFFIXES = tuple(dict.fromkeys(chain.from_iterable(kind.suffixes for kind in READ)))
"""The suffixes of trace files in a folder."""


def is_pickle(head: bytes) -> bool:
    """Return whether a file that begins with these bytes, two or more, is a pickle of protocol 2 to 5."""
    return _PICKLE.match(head) is not None


def kind_of(path: Path, head: bytes) -> Kind:
    """Return the kind of a file; its name counts only where its content does not say.

    Args:
        path: the file.
        head: its first bytes, unpacked if it is gzip.
    """
    by_content = (kind for kind in chain(OTHERS, READ) if kind.fits is not None and kind.fits(path, head))
    if kind := next(by_content, None):
        return kind
    if not head or head.lstrip()[:1] in (b"{", b"["):
        return CHROME
    named = (kind for kind in chain(OTHERS, READ) if path.name.endswith(kind.suffixes))
    return next(named, CHROME)
