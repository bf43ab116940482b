"""The names in a slim trace: of events, processes and threads, as they are or replaced by stand-ins."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Raw, Struct

from ...base.source_paths import INSTALLED
from ...base.trace_marks import SLIM, STEPS
from ...read.kineto.insert_events import FIRST_LANE
from ...read.kineto.kineto import DEVICE
from ...read.tables.autograd import OWN_NAME, engine_node_name
from ...read.tables.kernel_names import family, parse
from ...read.tables.trace import MODULE_PREFIX, Thread
from ...read.tables.work_classes import communicates
from ..metrics.idle import INPUT
from ..metrics.matmul_table import MATRIX_UNITS
from ..waits.trace_context import FRAME, PACKAGES
from .known_words import KnownWords, is_all_known

Id = int | str | float | None
"""The id of a process or a thread in a trace."""


class Names:
    """Keeps all names as they are."""

    def event(self, table: str, name: str) -> str:
        """Return the name of an event of a table."""
        return name

    def category(self, name: str | None) -> str | None:
        """Return the category of an event."""
        return name

    def value(self, text: str) -> str:
        """Return a value of the args of an event, as JSON."""
        return text

    def lane(self, number: Id) -> Id:
        """Return the id of a process or thread, which may be text."""
        return number

    def label(self, kind: str, text: str) -> str:
        """Return the name or the labels of a process or thread."""
        return text

    def metadata(self, about: dict[str, Any]) -> Mapping[str, Any]:
        """Return the metadata."""
        return about


Place = tuple[Id, Id]

_OF_PROCESS = ("process_name", "process_labels", "process_sort_index")
_SORTED = ("process_sort_index", "thread_sort_index")
_OF_THREAD = ("thread_name", "thread_sort_index")
_ARGS = ("name", "labels", "sort_index")


class _Name(Struct, gc=False):
    ph: str = ""
    name: str = ""
    pid: Id = ""
    tid: Id = ""
    args: Raw = Raw(b"{}")


_decode = msgspec.json.Decoder(_Name).decode


class LaneNames:
    """The metadata events that name the processes and threads of the events that stay.

    Args:
        threads: the threads of the trace, whose order stays, because numbers of threads follow from it.
        names: gives the names that are written.
    """

    def __init__(self, threads: Sequence[Thread], names: Names) -> None:
        self._names = names
        self._order: dict[Place, int] = {(each.process, each.thread): row for row, each in enumerate(threads)}
        self._thread_names: dict[Place, str] = {(each.process, each.thread): each.name for each in threads}
        self._lanes = dict[tuple[Place, int], Place]()
        self._used = dict[Place, Place]()
        self._found = dict[tuple[str, Id, Id], Mapping[str, object]]()

    def place(self, process: Id, thread: Id) -> Place:
        """Return a process and thread, and remember that an event of it stays."""
        place = process, thread
        return self._used.setdefault(place, place)

    def lane(self, place: Place, number: int) -> Place:
        """Return a lane of a thread for events that overlap others on it."""
        key = place, number
        if key not in self._lanes:
            lane = FIRST_LANE + len(self._lanes)
            while (place[0], lane) in self._order:
                lane += 1
            self._lanes[key] = place[0], lane
        return self._lanes[key]

    @property
    def lanes(self) -> list[list[Id]]:
        """The lanes: the process, the id of the lane, and the id of the thread."""
        return [[process, lane, place[1]] for (place, _), (process, lane) in self._lanes.items()]

    def take(self, texts: Iterable[bytes]) -> None:
        """Remember the names among the texts of events; of several, the reader takes the first."""
        for text in texts:
            if b'"M"' not in text:
                continue
            event = _decode(text)
            if event.ph == "M" and event.name in (*_OF_PROCESS, *_OF_THREAD):
                key = event.name, event.pid, event.tid if event.name in _OF_THREAD else 0
                if key not in self._found and (args := json_object(event.args)):
                    self._found[key] = args

    def events(self) -> Iterator[dict[str, object]]:
        """Yield the metadata events of what stays, in the order of the threads."""
        processes = {process for process, _ in self._used}
        last = len(self._order)
        for (name, process, thread), args in sorted(
            self._found.items(), key=lambda item: self._order.get(item[0][1:], last)
        ):
            if name in _OF_PROCESS and process not in processes:
                continue
            if name in _OF_THREAD and (process, thread) not in self._used:
                continue
            if name in _SORTED and args.get("sort_index") in (process, thread):
                continue  # viewers sort by these numbers anyway
            if name == "thread_name":
                args = {"name": self._thread_names.get((process, thread), "")}
            yield self._event(name, process, thread, {key: args[key] for key in _ARGS if key in args})
        for process, lane, thread in self.lanes:
            yield self._event("thread_name", process, lane, {"name": f"thread {thread}: overlaps"})

    def _event(self, name: str, process: Id, thread: Id, args: Mapping[str, object]) -> dict[str, object]:
        shown = {
            key: self._names.label(name, value) if isinstance(value, str) else value
            for key, value in args.items()
            if isinstance(value, (str, int, float))
        }
        place = {"pid": self._names.lane(process), "tid": self._names.lane(thread)}
        return {"ph": "M", "name": name, **place, "args": shown}


def json_object(raw: Raw) -> dict[str, object]:
    """Return a JSON object, whose text may be damaged; an empty one if the text is something else."""
    try:
        value = json.loads(bytes(raw).decode("utf-8", "replace"), parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


_NUMBER = r"[-+]?\d{1,6}(?:\.\d*)?(?:[eE][-+]?\d{1,3})?"
_COLLECTIVE = (
    r"_?(?:all_?gather|all_?reduce|reduce_?scatter|all_?to_?all|broadcast|reduce|gather|scatter|send|recv|barrier)"
    r"(?:_?(?:into_tensor|base|tensor|coalesced|v|single|oop))*"
)
_VALUE = re.compile(  # types, numbers as text, names of collectives and of default process groups
    rf"|{_NUMBER}|\[(?:(?:{_NUMBER}|True|False|None)(?:, ?)?)*\]|True|False|None|{_COLLECTIVE}"
    r"|(?:c10::)?(?:complex<(?:float|double|(?:c10::)?Half)>|B?Float(?:16|8_e\dm\d\w{0,2}(?:fnuz|uz)?)?|Half)"
    r"|(?:un)?signed char|(?:long|short) int|Scalar(?:List)?|TensorList|GenericList|Device|Stream"
    r"|(?:float|half|double|u?int|long|short|char|byte|bool|complex)(?:\d{1,3}|float|double)?"
    r"|default_pg|ns|ms|nccl|gloo|ucc|mpi",
    re.IGNORECASE,
)
_CATEGORIES = re.compile(
    r"(?:cpu_op|operator|user_annotation|gpu_user_annotation|python_function|(?:cuda|mtia|xpu|privateuse1)_runtime"
    r"|cuda_driver|runtime|kernel|(?:gpu_)?mem(?:cpy|set)|mtia_ccp_events|cuda_sync|trace|overhead|cpu_instant_event)?",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"'.*'|\".*\"", re.DOTALL)
_NUMBERS = re.compile(r"[\d.]{1,20}")
_STEPS = re.compile(r"\d{1,9}-\d{1,9}")
_DEVICE_NAME = re.compile(r"[\w .()+-]*", re.ASCII)


_LETTERS = "bcdfghjkmnpqrtvz"  # no word that a pattern of this library knows, such as "nccl"
_DIGITS = re.compile(r"\d+")
_MOST_DIGITS = 6  # of a number that stays; longer ones may identify something

# Names that torch writes as they are. The numbers of steps are the profiler's.
_OF_TORCH = re.compile(
    r"ProfilerStep#\d{1,9}|instrument_steps=\d{1,9}-\d{1,9}|PyTorch Profiler(?: \(\d{1,6}\))?|Record Window End"
    r"|Iteration Start: PyTorch Profiler|Python GC|Buffer Flush|\[memory\]|DistributedDataParallel\.forward"
    r"|Torch-Compiled Region: \d{1,6}/\d{1,6}|TorchDynamo Cache Lookup|AOTDispatcher Runtime Wrapper Prologue"
    r"|Pregraph bytecode|record_param_comms|detach_?|train_dataloader_next|_next_data|data|forward|backward"
    r"|optimizer|loss|step|## (?:wait_for_batch|forward|backward|optimizer|zero_grad)(?: ##)?"
)
# Known beginnings and ends of names, which rules look for.
_BEFORE = re.compile(
    r"Optimizer\.(?:step|zero_grad)#|enumerate\(DataLoader\)#?|nn\.Module: |Python GC ?|gc\.collect"
    r"|(?:nccl|gloo|mpi|ucc|xccl|hccl):|_compile\.|compile_fx|entire_frame_compile|backend_compile"
    r"|## wait_for_batch|Torch-Compiled Region: \d{1,6}/\d{1,6}|TorchDynamo Cache Lookup"
)
_AFTER = re.compile(r"(?:\.step|\.zero_grad|\.__next__| \((?:backward|eval|dynamo_timed)\))$")
_IDENTIFIER = re.compile(r"[\w.]*", re.ASCII)
_OPERATOR = re.compile(r"(?:[\w.:<>&#-]|\(anonymous namespace\)|> >|, )+", re.ASCII)
_OPERATOR_OF_LIBRARY = re.compile(
    r"(?:aten|prims?|c10d|_c10d_functional|autograd|torch|quantized|torchvision|fbgemm|vllm"
    r"|torch\.distributed\.ddp\.reducer)::[\w.:]+|triton_(?:poi|red|per|tem|for|mm)_\w+",
    re.ASCII,
)
_BACKWARD = re.compile("(?<![a-z])backward(?![a-z])", re.IGNORECASE)

_CODE = re.compile(r"[\w :<>(),.*&{}\[\]~#!=+-]*", re.ASCII)  # C++: no path and no other text
_FAMILY_WORDS = {
    "gemm": "gemm", "attention": "attention", "convolution": "conv", "normalization": "norm", "softmax": "softmax",
    "elementwise": "elementwise", "reduction": "reduce", "copy": "copy", "optimizer": "foreach",
    "embedding": "embedding",
}  # fmt: skip

_FUNCTION = re.compile(r"__\w+__|forward|backward", re.ASCII)
_PART_OF_PATH = re.compile(r"[\w.+-]+", re.ASCII)
_FUNCTION_OF_LIBRARY = re.compile(r"[\w.<>]+", re.ASCII)
_BUILT_IN = re.compile(
    r"<built-in (method|function) ([\w.]*)(?: of ([\w.]+) object(?: at 0x[0-9a-fA-F]+)?)?>", re.ASCII
)
_LABEL = re.compile(
    r"(?:CPU|GPU|NPU|TPU|XPU|HPU|MTIA|Ascend) ?\d{0,6}|stream \d{1,6} ?|thread -?\d+: overlaps|Spans|Traces"
    r"|GPU \d{1,6} Counters|(?:Trace )?PyTorch Profiler|"
)


class StandIns(Names):
    """Replaces names; the same name gets the same stand-in in every file that is made with the same key.

    A stand-in is a keyed hash. Without a key, anyone who guesses a name can check the guess; with a secret key,
    only those who know it can. Numbers of up to six digits stay, because they tell apart what a loop counts.

    Args:
        key: the key; empty for none.
    """

    def __init__(self, key: str = "") -> None:
        self._key = blake2b(key.encode("utf-8", "surrogatepass")).digest() if key else b""
        self._known: dict[tuple[str, str], str] = {}
        self._words = KnownWords(self._hash)
        self._rename = {
            "operators": self._operator,
            "frames": self._frame,
            "gpu": self._kernel,
            "runtime": self._call,
            "syncs": self._call,
            "counters": self._words.mask,
        }

    def event(self, table: str, name: str) -> str:
        """Return the stand-in of the name of an event of a table."""
        if (table, name) not in self._known:
            self._known[table, name] = self._rename.get(table, self._range)(name)
        return self._known[table, name]

    def category(self, name: str | None) -> str | None:
        """Return the category, or "other" for one that torch does not have."""
        return name if _CATEGORIES.fullmatch(name or "") else "other"

    def value(self, text: str) -> str:
        """Return a value, as JSON, with stand-ins for the texts in it."""
        if '"' not in text:
            return text
        try:
            return json.dumps(self._all(json.loads(text)), separators=(",", ":"))
        except (ValueError, RecursionError):
            return '""'

    def lane(self, number: Id) -> Id:
        """Return a number as it is, and a stand-in for text."""
        return self.label("lane", number) if isinstance(number, str) else number

    def label(self, kind: str, text: str) -> str:
        """Return the name of a thread of torch, or a stand-in."""
        if _LABEL.fullmatch(text):
            return text
        if own := OWN_NAME.search(text):
            return own[0]
        device = f" {number[0]}" if (number := DEVICE.search(text)) else ""
        return f"{kind.partition('_')[0]} {self._hash(text)}{device}"

    def metadata(self, about: dict[str, Any]) -> Mapping[str, Any]:
        """Return the metadata: numbers, and what is known of devices, process groups and the slim trace."""
        kept: dict[str, Any] = {}
        for key, value in about.items():
            if key == "deviceProperties" and isinstance(value, list):
                kept[key] = [self._device(each) for each in value]
            elif key == "distributedInfo" and isinstance(value, dict):
                kept[key] = self._groups(value)
            elif key == SLIM and isinstance(value, dict):
                kept[key] = self._note(value)
            elif _is_number(value) or (key == STEPS and _STEPS.fullmatch(str(value))):
                kept[key] = value
        return kept

    def _device(self, device: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in device.items() if key != "name" and _is_number(value)}
        if isinstance(name := device.get("name"), str):
            kept["name"] = self._words.mask(name) if _DEVICE_NAME.fullmatch(name) else f"GPU {self._hash(name)}"
        return kept

    def _groups(self, info: Mapping[str, Any]) -> dict[str, Any]:
        shown = {name: self._all(info[name]) for name in ("backend", "rank", "world_size") if name in info}
        if isinstance(groups := info.get("pg_config"), list):
            kept = [each for each in groups if isinstance(each, dict)]
            names = ("pg_name", "pg_size", "ranks")
            shown["pg_config"] = [{name: self._all(each[name]) for name in names if name in each} for each in kept]
        return shown

    def _note(self, note: Mapping[str, Any]) -> dict[str, Any]:
        kept: dict[str, Any] = {"events": note["events"]} if _is_number(note.get("events")) else {}
        if isinstance(lost := note.get("lost"), dict):
            kept["lost"] = _numbers(lost, "events", "bytes", "repaired")
            if isinstance(reasons := lost.get("reasons"), dict):
                kept["lost"]["reasons"] = self._reasons(reasons)
        if isinstance(lanes := note.get("lanes"), list):
            rows = [each for each in lanes if isinstance(each, list) and len(each) == 3]
            kept["lanes"] = [
                list(map(self.lane, row))
                for row in rows
                if not any(isinstance(each, (list, dict)) for each in row)
            ]
        if isinstance(steps := note.get("steps"), dict):
            kept["steps"] = _numbers(steps, "first", "last", "kept", "of")
        return kept

    def _reasons(self, reasons: Mapping[str, Any]) -> dict[str, Any]:
        """Return why parts of the file could not be read, without the texts that are quoted from it."""
        counts: dict[str, Any] = {}
        for reason, count in reasons.items():
            masked = self._words.mask(_QUOTED.sub("'...'", str(reason)))
            if type(count) is int:
                counts[masked] = counts.get(masked, 0) + count
        return counts

    def _all(self, value: Any) -> Any:
        """Return a JSON value with stand-ins for all texts but numbers, types and names of collectives."""
        if isinstance(value, str):
            return value if _VALUE.fullmatch(value) else self._hash(value)
        if isinstance(value, list):
            return [self._all(each) for each in value]
        if isinstance(value, dict):
            return {self._all(key): self._all(each) for key, each in value.items()}
        return value

    def _hash(self, text: str) -> str:
        digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=5, key=self._key).digest()
        return "".join(_LETTERS[byte >> 4] + _LETTERS[byte & 15] for byte in digest)

    def _with_numbers(self, text: str) -> str:
        """Return a stand-in of a whole text that has its numbers, and the words that rules look for in it."""
        numbers = [
            number if len(number) <= _MOST_DIGITS else self._hash(number) for number in _DIGITS.findall(text)
        ]
        separated = "_" * (_BACKWARD.search(text) is not None)
        words = f"{separated}backward" * ("backward" in text.lower())
        words += "_next_data" * (INPUT.search(text) is not None)
        return "_".join([self._hash(_DIGITS.sub("#", text)) + words, *numbers])

    def _range(self, name: str) -> str:
        """Return the name of a region, a step or a module."""
        if _OF_TORCH.fullmatch(name):
            return name
        if _OPERATOR_OF_LIBRARY.fullmatch(name):
            return self._words.mask(name)
        before = match[0] if (match := _BEFORE.match(name)) else ""
        after = match[0] if (match := _AFTER.search(name, len(before))) else ""
        middle = name[len(before) : len(name) - len(after)]
        library = (before or "dynamo_timed" in after) and _IDENTIFIER.fullmatch(middle)
        return before + (self._words.mask(middle) if library else self._with_numbers(middle)) + after

    def _operator(self, name: str) -> str:
        """Return the name of an operator or of a node of autograd."""
        node = engine_node_name(name)
        operator = name if node is None else node
        if not _OPERATOR.fullmatch(operator):
            return self._range(name) if node is None else name.removesuffix(node) + self._with_numbers(node)
        return name.removesuffix(operator) + self._words.mask(operator)

    def _kernel(self, name: str) -> str:
        """Return the name of a kernel with stand-ins for the words that no library has; its family stays."""
        if _CODE.fullmatch(name) and _class(masked := self._words.mask(name)) == _class(name):
            return masked
        word = "all_reduce" if communicates(name) else _FAMILY_WORDS.get(family(parse(name)), "kernel")
        return f"{word}_{self._hash(name)}" + "_tensorop" * (MATRIX_UNITS.search(name) is not None)

    def _call(self, name: str) -> str:
        """Return the name of a call of the runtime or of a synchronization."""
        return self._words.mask(name) if _CODE.fullmatch(name) else f"call {self._words.parts(name)}"

    def _frame(self, name: str) -> str:
        """Return the name of a module, or of a function with its file and line."""
        if name.startswith(MODULE_PREFIX):
            return self._range(name)
        if built_in := _BUILT_IN.fullmatch(name):
            kind, function, owner = built_in.groups()
            of = f" of {self._words.mask(owner)} object" if owner else ""
            return f"<built-in {kind} {self._words.mask(function)}{of}>"
        if not (frame := FRAME.fullmatch(name)):
            return self._hash(name)
        file, function = self._file(frame["file"].replace("\\", "/")), frame["function"]
        if file.startswith("user/"):
            of_python = _FUNCTION.fullmatch(function) and is_all_known(function)
            function = function if of_python or function in ("<module>", "<lambda>") else self._hash(function)
        elif _FUNCTION_OF_LIBRARY.fullmatch(function):
            function = self._words.mask(function)
        else:
            function = self._hash(function)
        line = frame["line"] if len(frame["line"]) <= _MOST_DIGITS else "0"
        return f"{file}({line}): {function}"

    def _file(self, path: str) -> str:
        """Return the path of a file within a known package with its known words, or a stand-in."""
        inside = path
        for folder in INSTALLED:
            inside = inside.rpartition(folder.replace("\\", "/"))[2]
        parts = inside.split("/")
        in_package = parts[0].removesuffix(".py") in (*PACKAGES, *sys.stdlib_module_names)
        if in_package and all(_PART_OF_PATH.fullmatch(part) and part != ".." for part in parts):
            return "/".join(map(self._words.mask, parts))
        library = "lib/site-packages" if inside != path else "user"
        return f"{library}/{self._hash(path)}.py"


def _class(name: str) -> tuple[str, bool, bool]:
    """Return the family of a kernel, whether it communicates, and whether it runs on matrix units."""
    return family(parse(name)), communicates(name), MATRIX_UNITS.search(name) is not None


def _numbers(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names if _is_number(values.get(name))}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, str) and bool(_NUMBERS.fullmatch(value)))
