"""`StandIns`: replaces names that identify people, machines or their code; those of torch and libraries stay."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from ..diagnosis.tensor_cores import MATRIX_UNITS
from ..syncs.trace_stacks import FRAME, PACKAGES
from ..traces.autograd import OWN_NAME, engine_node_name
from ..traces.communication import communicates
from ..traces.kernel_families import family
from ..traces.kernel_names import parse
from ..traces.slim_note import KEY
from ..traces.trace import MODULE_PREFIX
from .names import Id, Names

_LETTERS = "bcdfghjklmnpqrtv"  # no vowels: no word that a pattern of this library knows
_DIGITS = re.compile(r"(?<!\d)\d{1,6}(?!\d)")  # longer numbers may identify something

_OPTIMIZERS = "|".join((
    *("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "LBFGS", "NAdam", "RAdam", "RMSprop"),
    *("Rprop", "SparseAdam", "Adafactor", "Muon"),
))  # fmt: skip
_OF_TORCH = re.compile(
    r"ProfilerStep#\d{1,18}|instrument_steps=\d{1,18}-\d{1,18}|PyTorch Profiler(?: \(\d+\))?|Record Window End"
    rf"|Optimizer\.(?:step|zero_grad)#(?:{_OPTIMIZERS})\.(?:step|zero_grad)|Iteration Start: PyTorch Profiler"
    r"|enumerate\(DataLoader\)#_(?:Single|Multi)ProcessingDataLoaderIter\.__next__|(?:nccl|gloo|mpi|ucc):\w+"
    r"|enumerate\(DataLoader\)#_(?:Single|Multi)ProcessDataLoaderIter\.__next__|Python GC|Buffer Flush"
    r"|DistributedDataParallel\.forward|Torch-Compiled Region: \d+/\d+|TorchDynamo Cache Lookup|\[memory\]"
    r"|train_dataloader_next|_next_data|data|forward|backward|optimizer|loss|step"
    r"|## (?:wait_for_batch|forward|backward|optimizer|zero_grad)(?: ##)?"
    r"|(?:[A-Z]\w*\.)?\w+ \(dynamo_timed\)|record_param_comms|detach_?|CompiledFunction(?:Backward)?"
    r"|triton_(?:poi|red|per|tem|for|mm)_\w+"
    r"|(?:aten|prims?|c10d|_c10d_functional|autograd|torch|quantized|torchvision|fbgemm|vllm|torch\.distributed\.ddp\.reducer)"
    r"(?:::[\w.]+)+"
)
_NODE = re.compile(r"\w+Backward\d+|torch::autograd::\w+|CompiledFunctionBackward")  # of a program: no number
_BEFORE = re.compile(
    r"Optimizer\.(?:step|zero_grad)#|enumerate\(DataLoader\)#?|nn\.Module: |Python GC ?|gc\.collect"
)
_AFTER = re.compile(r"\.step|\.zero_grad|\.__next__| \((?:backward|eval)\)")
_MODULES = re.compile(
    r"(?:Linear|Bilinear|Identity|Embedding|EmbeddingBag|Dropout\dd?|Dropout|Sequential|ModuleList|ModuleDict"
    r"|LayerNorm|RMSNorm|GroupNorm|(?:Sync)?BatchNorm(?:\dd)?|InstanceNorm\dd|Conv(?:Transpose)?\dd|ReLU6?|GELU|SiLU"
    r"|Sigmoid|Tanh|Softmax|LogSoftmax|MultiheadAttention|Transformer\w{0,16}|LSTM|GRU|RNN|Flatten"
    r"|(?:Max|Avg|AdaptiveAvg|AdaptiveMax)Pool\dd|CrossEntropyLoss|MSELoss|NLLLoss)_\d+"
)
_KERNEL = re.compile(
    r"(?:void |std::enable_if<[^@]{0,200}>::type )?(?:\(anonymous namespace\)::|internal::)?"
    r"(?:at(?:_cuda_detail)?::|aten::|c10::|cutlass|cublas|cudnn|cub::|thrust::|cask|ck::|ck_tile::|fbgemm|deep_ep"
    r"|_ZN(?:2at6native|2ck|7ck_tile|\d\dcutlass|7cutlass)|pytorch_flash|flash_(?:fwd|bwd)|fmha_|nccl(?:Dev)?Kernel|rccl|cunn_"
    r"|sm\d+_|ampere_|volta_|turing_|hopper_|Cijk_|nvjet_|gemv|gemm|split[kK]|dot_kernel|reduce_1|igemm_(?:fwd|bwd|wrw)_"
    r"|(?:im|ex)plicit_convolve|softmax_warp|triton_(?:poi|red|per|tem|for|mm)_|Mem(?:cpy|set)\b|__amd_rocclr|miopen"
    r"|rocblas|hipblas|batched_transpose|[wd]grad_|SubTensorOp|multi_tensor|elementwise_kernel|indexing_backward|dma_request)"
)
_SAFE_KERNEL = re.compile(r"[\w :<>(),.*&{}\[\]~#!=+-]*")  # no path, and no text but C++
_WORD = {
    "gemm": "gemm", "attention": "attention", "convolution": "conv", "normalization": "norm", "softmax": "softmax",
    "elementwise": "elementwise", "reduction": "reduce", "copy": "copy", "optimizer": "foreach",
    "embedding": "embedding",
}  # fmt: skip

_FUNCTION = re.compile(r"__\w+__|<(?:module|lambda|listcomp|genexpr)>|forward|backward")
_FUNCTION_OF_LIBRARY = re.compile(r"[\w.<>]+")
_FILE_OF_LIBRARY = re.compile(r"[\w./+-]+")
_STANDARD = (
    "asyncio",
    "concurrent",
    "contextlib.py",
    "functools.py",
    "multiprocessing",
    "runpy.py",
    "threading.py",
)
_BUILT_IN = re.compile(
    r"<built-in (method|function) (\w+)"
    r"(?: of (Tensor|type|module|dict|list|tuple|str|int) object(?: at 0x[0-9a-f]+)?)?>"
)
_OF_C = re.compile(r"_cuda_\w+|_[A-Z]\w+|len|print|isinstance|getattr|setattr|hasattr|iter|next|sum|min|max")

_VALUE = re.compile(  # types, numbers as text, names of collectives and process groups
    r"|c10::\w+(?:<\w+>)?|(?:un)?signed char|(?:long|short) int|Scalar(?:List)?|TensorList|GenericList|Device"
    r"|Stream|[-+\d.eE]+|\[(?:[\d.eE+\-, \[\]]|True|False|None)*\]|True|False|None"
    r"|default_pg|ns|ms|nccl|gloo|ucc|mpi"
    r"|(?:b?float|half|double|u?int|long|short|char|byte|bool|complex)(?:\d+|float|double)?(?:_\w{4,8})?"
    r"|_?(?:all_?gather|all_?reduce|reduce_?scatter|all_?to_?all|broadcast|reduce|gather|scatter|send|recv|barrier)"
    r"(?:_?(?:into_tensor|base|tensor|coalesced|v|single|oop))*",
    re.IGNORECASE,
)
_CATEGORIES = re.compile(
    r"(?:cpu_op|operator|user_annotation|gpu_user_annotation|python_function|(?:cuda|mtia|xpu|privateuse1)_runtime"
    r"|cuda_driver|runtime|kernel|(?:gpu_)?mem(?:cpy|set)|mtia_ccp_events|cuda_sync|trace|overhead|cpu_instant_event)?",
    re.IGNORECASE,
)
_LABEL = re.compile(
    r"(?:CPU|GPU|NPU|TPU|XPU|HPU|MTIA|Ascend) ?\d*|stream \d+ ?|thread \d+: overlaps|Spans|Traces"
    r"|PyTorch Profiler|"
)
_QUOTED = re.compile(r"'[^']*'")


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

    def event(self, table: str, name: str) -> str:
        """Return the stand-in of the name of an event of a table."""
        if (table, name) not in self._known:
            rename = {"frames": self._frame, "gpu": self._kernel, "runtime": self._call, "syncs": self._call}
            self._known[table, name] = rename.get(table, self._range)(name)
        return self._known[table, name]

    def category(self, name: str | None) -> str | None:
        """Return the category, or "other" for one that torch does not have."""
        return name if _CATEGORIES.fullmatch(name or "") else "other"

    def value(self, text: str) -> str:
        """Return a value with stand-ins for the texts in it."""
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
        return f"{kind.partition('_')[0]} {self._hash(text)}"

    def metadata(self, about: dict[str, Any]) -> Mapping[str, Any]:
        """Return the metadata with stand-ins in process groups, and losses without the texts that they quote."""
        found = dict(about)
        if isinstance(groups := found.pop("distributedInfo", None), dict):
            found["distributedInfo"] = self._groups(groups)
        if isinstance(note := found.pop(KEY, None), dict):
            lost = note.get("lost")
            if isinstance(lost, dict) and isinstance(reasons := lost.get("reasons"), dict):
                lost = lost | {
                    "reasons": {_QUOTED.sub("'...'", str(key)): count for key, count in reasons.items()}
                }
                note = note | {"lost": lost}
            found[KEY] = note
        return found

    def _groups(self, info: dict[str, Any]) -> dict[str, Any]:
        known: dict[str, Any] = {
            name: self._all(info[name]) for name in ("backend", "rank", "world_size") if name in info
        }
        if isinstance(groups := info.get("pg_config"), list):
            kept = [each for each in groups if isinstance(each, dict)]
            names = ("pg_name", "pg_size", "ranks")
            known["pg_config"] = [{name: self._all(each[name]) for name in names if name in each} for each in kept]
        return known

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
        """Return a stand-in that has the same numbers, and "backward" if the text has it."""
        numbers = _DIGITS.findall(text)
        word = self._hash(_DIGITS.sub("#", text)) + "_backward" * ("backward" in text.lower())
        return "_".join([word, *numbers])

    def _range(self, name: str) -> str:
        """Return the name of an operator, a region or a module."""
        if _OF_TORCH.fullmatch(name):
            return name
        if (node := engine_node_name(name)) is not None:
            return name.removesuffix(node) + (node if _NODE.fullmatch(node) else self._with_numbers(node))
        if _NODE.fullmatch(name):
            return name
        before = found[0] if (found := _BEFORE.match(name)) else ""
        after = next((each[0] for each in _AFTER.finditer(name) if each.end() == len(name)), "")
        middle = name[len(before) : len(name) - len(after)]
        known = before == MODULE_PREFIX and _MODULES.fullmatch(middle)
        return before + (middle if known else self._with_numbers(middle)) + after

    def _kernel(self, name: str) -> str:
        """Return the name of a kernel of a library, or a stand-in of the same family."""
        if _KERNEL.match(name) and _SAFE_KERNEL.fullmatch(name):
            return name
        word = "all_reduce" if communicates(name) else _WORD.get(family(parse(name)), "kernel")
        return f"{word}_{self._hash(name)}" + "_tensorop" * (MATRIX_UNITS.search(name) is not None)

    def _call(self, name: str) -> str:
        return (
            name if re.fullmatch(r"(?:cuda|cu|hip|hsa|mtia|Stream|Event|Context|Device)[\w ]*", name) else "call"
        )

    def _frame(self, name: str) -> str:
        """Return the name of a module, or of a function with its file and line."""
        if name.startswith(MODULE_PREFIX):
            return self._range(name)
        if built_in := _BUILT_IN.fullmatch(name):
            kind, function, owner = built_in.groups()
            known = function if owner or _OF_C.fullmatch(function) else self._hash(function)
            return f"<built-in {kind} {known}" + (f" of {owner} object>" if owner else ">")
        if not (frame := FRAME.fullmatch(name)):
            return self._hash(name)
        file, function = self._file(frame["file"].replace("\\", "/")), frame["function"]
        kept = _FUNCTION if file.startswith("user/") else _FUNCTION_OF_LIBRARY
        return f"{file}({frame['line']}): {function if kept.fullmatch(function) else self._hash(function)}"

    def _file(self, path: str) -> str:
        """Return the path of a file within a known package, or a stand-in."""
        for folder in ("site-packages/", "dist-packages/"):
            path = path.rpartition(folder)[2]
        known = path.split("/")[0] in (*PACKAGES, *_STANDARD) and ".." not in path
        return path if known and _FILE_OF_LIBRARY.fullmatch(path) else f"user/{self._hash(path)}.py"
