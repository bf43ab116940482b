"""Gives kernels short names, which tell those of a trace apart at a glance, and sorts them into families."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from .table import KERNEL, Strings, Table
from .work_classes import communication_mask

_SHORT = 32  # characters; names up to this length, such as "volta_sgemm_128x64_nt", are known as they are

_MATRIX = re.compile(r"gemm|nvjet|[sh]cudnn|fprop|dgrad|wgrad")
_CONVOLUTION = re.compile(r"(fprop|dgrad|wgrad|winograd)|[sh]cudnn|igemm_(fwd|bwd|wrw)")
_ARCHITECTURE = re.compile(r"sm_?(\d+)|cutlass_(\d+)_|(volta|turing|ampere|hopper|blackwell|maxwell)")
_GENERATIONS = {
    "maxwell": "sm50", "volta": "sm70", "turing": "sm75", "ampere": "sm80", "hopper": "sm90", "blackwell": "sm100",
}  # fmt: skip
_TILE = re.compile(r"(?:tilesize|_bt|_)(\d+x\d+(?:x\d+)?)(?:_(\d+)x\d+(?=_|$))?")
_LAYOUT = re.compile(r"_([nt]{2}|[NT]{3}|nhwc|nchw)(?:_|$)")
_ALIGNMENT = re.compile(r"_(align\d+)")

_NAMED_TYPE = re.compile(r"(?<![a-z])(bf16|fp?16|tf32|fp?32|fp?64|e4m3|e5m2|fp8|[is]8)")
_TF32 = re.compile(r"_s1688(?:gemm|fprop|dgrad|wgrad)")
_F16 = re.compile(r"_h\d+(?:gemm|fprop|dgrad|wgrad)")
_LETTER = re.compile(r"(?:^|_)([shdcz])(?:gemm|cudnn)")
_BLAS = {"s": "f32", "h": "f16", "d": "f64", "c": "c64", "z": "c128"}
_NVJET = {"t": "bf16", "h": "f16", "s": "f32", "d": "f64", "q": "fp8"}

_TENSILE = re.compile(r"Cijk_(\w+?_\w+?)_(I8|F8|[SDHB])\w*?_(MT\d+x\d+x\d+)")
_TENSILE_TYPES = {"S": "f32", "D": "f64", "H": "f16", "B": "bf16", "I8": "i8", "F8": "fp8"}


def matrix_kernel(base: str) -> str:
    """Return a short name such as "gemm sm90 bf16 128x256x64 tn", or "" for kernels of other kinds.

    The names are those of cuBLAS, cuDNN, CUTLASS, MIOpen and Tensile.

    Args:
        base: the name of a kernel without namespaces and template arguments.
    """
    if tensile := _TENSILE.match(base):
        return f"Cijk {tensile[1]} {tensile[3]} {_TENSILE_TYPES[tensile[2]]}"
    if len(base) <= _SHORT or base.startswith("triton_") or not _MATRIX.search(base):
        return ""
    convolution = _CONVOLUTION.search(base)
    words = ["conv", convolution[1] or convolution[2] or ""] if convolution else ["gemm"]
    architecture = _ARCHITECTURE.search(base)
    if base.startswith("nvjet"):
        words.append("nvjet")
    elif architecture:
        words.append(_GENERATIONS.get(architecture[3] or "", f"sm{architecture[1] or architecture[2]}"))
    words.append(_matrix_type(base))
    if tile := _TILE.search(base):
        depth = f"x{tile[2]}" if tile[2] and tile[1].count("x") == 1 else ""
        words.append(tile[1] + depth)
    words += [match[1] for match in (_LAYOUT.search(base), _ALIGNMENT.search(base)) if match]
    some = [word for word in words if word]
    return " ".join(some) if len(some) > 2 else ""


def _matrix_type(base: str) -> str:
    """Return the type of the inputs; "" if the name does not say."""
    if base.startswith("nvjet_"):
        return _NVJET.get(base[6:7], "")
    if named := _NAMED_TYPE.search(base):
        return "i8" if named[1] == "s8" else named[1].replace("fp", "f") if named[1] != "fp8" else "fp8"
    if _TF32.search(base):
        return "tf32"
    if _F16.search(base):
        return "f16"
    letter = _LETTER.search(base)
    return _BLAS[letter[1]] if letter else ""


_MAX_LENGTH = 4096  # characters of a name that are read
_SEARCHED = 512  # characters of the name of a function
_CUT = 120  # characters of a short name
_DETAILS = 200  # words
# Names with the same short name are told apart by at most four words and four numbers; this bounds the time.
_WORDS, _COLUMNS, _ALIKE = 4, 100, 32

TYPES = {
    "float": "f32", "double": "f64", "half": "f16", "__half": "f16", "Half": "f16", "half_t": "f16",
    "_Float16": "f16", "BFloat16": "bf16", "__nv_bfloat16": "bf16", "nv_bfloat16": "bf16",
    "__hip_bfloat16": "bf16", "hip_bfloat16": "bf16", "bfloat16_t": "bf16", "tfloat32_t": "tf32",
    "complex<float>": "c64", "complex<double>": "c128", "bool": "bool",
    "__nv_fp8_e4m3": "e4m3", "Float8_e4m3fn": "e4m3", "Float8_e4m3fnuz": "e4m3", "float_e4m3_t": "e4m3",
    "__nv_fp8_e5m2": "e5m2", "Float8_e5m2": "e5m2", "Float8_e5m2fnuz": "e5m2", "float_e5m2_t": "e5m2",
    "signed char": "i8", "char": "i8", "short": "i16", "int": "i32", "long": "i64", "long long": "i64",
    "unsigned char": "u8", "unsigned short": "u16", "unsigned int": "u32", "unsigned long": "u64",
    "unsigned long long": "u64",
}  # fmt: skip
_INTEGERS = re.compile("[iu]|bool")

# The profilers' demanglers write `(int)4`, `4u` or `4`, and name lambdas and anonymous namespaces differently.
_ANONYMOUS = ("(anonymous namespace)::", "<unnamed>::")
_CAST = re.compile(r"\((?:int|bool|(?:unsigned )?(?:int|long))\)(?=[\w-])")
_SUFFIX = re.compile(r"\b(\d+)[uU][lL]{0,2}\b")
_INSTANCE = re.compile(r"\[lambda\(([^()]*)\) \(instance (\d+)\)\]")
_QUALIFIERS = re.compile(r"\b(?:const|volatile|__restrict__)\b|[*&]")
_SCOPE = re.compile(r"^(?:\w+::)+")
_BRACKET = re.compile(r"[<({>)},]")
_WORD = re.compile(r"[\w.]+")
_EMPTY_WORDS = {
    "at", "native", "detail", "cub", "std", "c10", "operator", "const", "cutlass", "cute", "cuda", "void",
}  # fmt: skip

_ELEMENTWISE = {
    "elementwise_kernel": "strided", "vectorized_elementwise_kernel": "vectorized",
    "unrolled_elementwise_kernel": "unrolled", "elementwise_kernel_manual_unroll": "manual unroll",
    "elementwise_kernel_with_index": "index", "index_elementwise_kernel": "index",
    "_scatter_gather_elementwise_kernel": "scatter, gather", "legacy_elementwise_kernel": "legacy",
    "vectorized_templated_elementwise_kernel": "vectorized, casts",
}  # fmt: skip
_ARITIES = {"UnaryFunctor", "AUnaryFunctor", "BUnaryFunctor", "BinaryFunctor"}
_TYPED = {"func_wrapper_t", "ReduceOp"}  # the functor follows the type
_CALLERS = {"gpu_kernel_impl", "gpu_kernel_impl_nocast", "gpu_index_kernel"}
_LAMBDA = re.compile(r"\{lambda\(([^()]*)\)#\d+\}")
_AFFIX = re.compile(
    r"^CUDAFunctor(?:On\w+?)?_|^CUDAFunctor|^launch_|^_?cuda_"
    r"|_?(?:cuda)?_?kernel(?:_impl|_cuda)*$|CUDAKernelImpl$|_cuda(?:_out)?$|_?[Ff]unctor$|Ops$|_impl$|_internal$"
)
_CAMEL_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

# Entry points that say nothing by themselves: the kernel is their argument.
_ENTRIES = {"Kernel", "Kernel2", "device_kernel", "kernel", "kentry"}
_GENERIC_NAMES = _ENTRIES | {"GemmKernel", "dispatch", "combine"}  # shown with the namespace before them

_NCCL_ALGORITHM = re.compile(r"_(?:RING|TREE|COLLNET|NVLS|PAT)\w*?_(?:LL128|LL|SIMPLE)")
# In a mangled name: a substitution, a template argument that is a number, or the length of an identifier.
_MANGLED = re.compile(r"S[0-9A-Z]*_|(?:L[a-z]n?|E)(\d+)E|([1-9]\d*)")


class KernelName(NamedTuple):
    """The name of a kernel in parts.

    Attributes:
        short: the part that a person reads first.
        base: the name of the function, without namespaces and template arguments.
        details: the other words of the full name, in order.
    """

    short: str
    base: str
    details: tuple[str, ...] = ()


@lru_cache(4096)
def parse(name: str) -> KernelName:
    """Return the parts of the full name of a kernel, as a profiler wrote it: demangled, mangled or cut off."""
    if name.startswith("_Z"):
        return _mangled(name)
    text = name[:_MAX_LENGTH].removeprefix("void ")
    if text.startswith("std::enable_if<"):  # a return type
        text = text.partition(">::type ")[2]
    for anonymous in _ANONYMOUS:
        text = text.replace(anonymous, "")
    path, arguments = _split(text)
    arguments = [_respell(text) for text in arguments]
    base = _base(path)
    if not arguments:
        return _plain(path)
    if base in _ELEMENTWISE:
        operation = _operation(arguments)
        details = (_ELEMENTWISE[base], *_words(arguments))
        return KernelName(f"elementwise: {operation}" if operation else "elementwise", base, details)
    if base == "reduce_kernel":
        return KernelName(f"reduce: {_operation(arguments)}", base, _words(arguments))
    if base == "multi_tensor_apply_kernel":
        return KernelName(f"foreach: {_foreach(arguments)}", base, _words(arguments))
    if base in _ENTRIES:
        return _entry(path, arguments)
    return KernelName(_last(path) + _of(_type(arguments)), base, _words(arguments))


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return the short name of each full name; different names have different short names.

    Where `parse` gives several names the same short one, the words in which they differ follow in brackets, or
    part of a hash of the full name.
    """
    alike = defaultdict(list)
    for name in dict.fromkeys(names):
        alike[parse(name).short[:_CUT]].append(name)
    result: dict[str, str] = {}
    for short, same in alike.items():
        words = _differences([parse(name).details for name in same])
        seen = defaultdict(list)
        for name, apart in zip(same, words, strict=True):
            seen[f"{short} ({', '.join(apart)})" if apart else short].append(name)
        for shown, left in seen.items():
            unique = len(left) == 1 and (shown not in alike or shown == short)
            for name in left:
                code = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:8]
                result[name] = shown if unique else f"{shown} #{code}"
    return result


def _differences(details: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return, for each list of words, some words that tell it from the others where that is possible."""
    distinct_words: list[tuple[str, ...]] = [()] * len(details)
    if not 1 < len(details) <= _ALIKE:
        return distinct_words
    differing = (column for column in _columns(details) if len(set(column)) > 1)
    columns = list(islice(differing, _COLUMNS))
    for numbers in (False, True):  # numbers say less
        left = [column for column in columns if numbers == any(map(str.isdigit, column))]
        for _ in range(_WORDS):
            counts = [len({*zip(distinct_words, column, strict=True)}) for column in left]
            if max(counts, default=0) <= len(set(distinct_words)):
                break
            best = left.pop(counts.index(max(counts)))
            distinct_words = [(*words, word) for words, word in zip(distinct_words, best, strict=True)]
    return [tuple(filter(None, words)) for words in distinct_words]


def _columns(details: Sequence[tuple[str, ...]]) -> Iterable[tuple[str, ...]]:
    """Return words of each list side by side: one by one, or by presence where the lists have other lengths."""
    if len({len(words) for words in details}) == 1:
        return zip(*details, strict=True)
    words = dict.fromkeys(word for own in details for word in own)
    sets = [set(own) for own in details]
    return (tuple(word if word in own else "" for own in sets) for word in words)


def _split(text: str) -> tuple[str, list[str]]:
    """Return the path before the first bracket, and the template arguments that follow it."""
    first = re.search(r"[<(]", text)
    if not first or first[0] == "(":
        return text[: first.start()] if first else text, []
    path, arguments, depth, begin = text[: first.start()], [], 0, first.end()
    for match in _BRACKET.finditer(text, first.start()):
        if match[0] in "<({":
            depth += 1
        elif match[0] != ",":
            depth -= 1
        if depth == (1 if match[0] == "," else 0):
            arguments.append(text[begin : match.start()].strip())
            begin = match.end()
            if not depth:
                return path, arguments
    return path, [*arguments, text[begin:].strip()]  # the name was cut off


def _respell(text: str) -> str:
    """Return the text in the spelling of Kineto on CUDA."""
    text = _SUFFIX.sub(r"\1", _CAST.sub("", text))
    return _INSTANCE.sub(r"{lambda(\1)#\2}", text).replace("operator ()", "operator()")


def _base(path: str) -> str:
    return path.rpartition("::")[2].strip()


def _last(path: str) -> str:
    """Return the last part of a path, with the part before it if the last is vague."""
    parts = path.strip().split("::")
    return "::".join(parts[-2:]) if parts[-1] in _GENERIC_NAMES else parts[-1]


def _plain(path: str) -> KernelName:
    """Return the parts of a name without template arguments."""
    base = _base(path).removesuffix(".kd")  # the suffix of HIP's kernel descriptors
    words = tuple(filter(None, base.split("_")))[:_DETAILS]
    if "-dtype_" in path:  # MTIA's names are operators
        return KernelName(path, base, words)
    if base.startswith("nccl"):
        return KernelName(_NCCL_ALGORITHM.sub("", base[:_SEARCHED]), base, words)
    return KernelName(matrix_kernel(base[:_SEARCHED]) or _last(path), base, words)


def _entry(path: str, arguments: list[str]) -> KernelName:
    """Return the parts of a name such as ``cutlass::Kernel2<...>``, whose argument is the kernel."""
    inside, deeper = _split(next((text for text in arguments if not _is_value(text)), ""))
    if not inside or TYPES.get(_without_qualifiers(inside)):
        return KernelName(_last(path) + _of(_type(arguments)), _base(path), _words(arguments))
    if not deeper:
        return _plain(inside)
    return KernelName(_last(inside) + _of(_type(deeper)), _base(inside), _words(arguments))


def _operation(arguments: list[str]) -> str:
    """Return the operation of PyTorch's elementwise and reducing kernels, with its type: "mul<bf16>"."""
    dtype = ""
    while True:
        functor = next(
            (text for text in arguments if not (_is_value(text) or TYPES.get(_without_qualifiers(text)))), ""
        )
        path, inner = _split(functor.removeprefix("void "))
        base = _base(path)
        if not inner or base not in _ARITIES | _TYPED | _CALLERS:
            break
        if base not in _CALLERS:
            dtype = dtype or _type(inner[:1])
        arguments = inner[-1:] if base in _ARITIES else inner[1:] if base in _TYPED else inner
    if not dtype and inner:
        dtype = _type(inner)
    elif not dtype:
        taken = [
            TYPES.get(_without_qualifiers(text), "")
            for last in _LAMBDA.findall(functor)[-1:]
            for text in last.split(",")
        ]
        dtype = next((type_ for type_ in taken if type_ and type_ != "bool"), taken[0] if taken else "")
    name = _base(path)
    plain = _AFFIX.sub("", _AFFIX.sub("", name)) or name
    return _CAMEL_CASE.sub("_", plain).lower() + _of(dtype) if plain else ""


def _foreach(arguments: list[str]) -> str:
    path, inner = _split(arguments[min(1, len(arguments) - 1)])
    what = [_base(_split(text)[0]).removesuffix("Functor") for text in arguments[2:3] if "<" in text]
    return " ".join([_base(path).removesuffix("Functor"), *what]) + _of(_type(inner))


def _is_value(text: str) -> bool:
    return bool(re.fullmatch(r"-?\d+|true|false", text))


def _without_qualifiers(text: str) -> str:
    return _SCOPE.sub("", _QUALIFIERS.sub("", text).strip())


def _of(dtype: str) -> str:
    return f"<{dtype}>" if dtype else ""


def _type(arguments: Sequence[str], depth: int = 3) -> str:
    """Return the first floating-point type among template arguments, else the first integer type, else ""."""
    types = [type_ for text in arguments if (type_ := _type_of(text))]
    if types:
        return next((type_ for type_ in types if not _INTEGERS.match(type_)), types[0])
    inner = (_type(_split(text)[1], depth - 1) for text in arguments if depth and "<" in text)
    return next(filter(None, inner), "")


def _type_of(text: str) -> str:
    """Return the short name of a type of numbers, the size of an opaque one, or ""."""
    bare = _without_qualifiers(text)
    opaque = re.fullmatch(r"OpaqueType<(\d+)>", bare)
    return f"{opaque[1]} B" if opaque else TYPES.get(bare, "")


def _words(arguments: Iterable[str]) -> tuple[str, ...]:
    words = (word for text in arguments for word in _WORD.findall(text) if word not in _EMPTY_WORDS)
    return tuple(TYPES.get(word, word) for word in islice(words, _DETAILS))


def _mangled(name: str) -> KernelName:
    """Return the parts of a mangled name from its identifiers alone: long names are often cut off."""
    paths: list[list[str]] = [[]]
    words, reached = [], 0
    for word, begin, end in _mangled_words(name):
        words.append(word)
        if word.startswith("_GLOBAL__N_"):
            reached = end
        elif not word.isdigit():
            if begin != reached and paths[-1]:
                paths.append([])
            paths[-1].append(word)
            reached = end
    path = next((path for path in paths if path and path[-1] not in _ENTRIES), paths[0])
    kernel = _plain("::".join(path)) if path else KernelName(name, name)
    return kernel._replace(details=tuple(words[:_DETAILS]))


def _mangled_words(name: str) -> Iterator[tuple[str, int, int]]:
    place = 2
    while match := _MANGLED.search(name, place, _MAX_LENGTH):
        place = match.end()
        if match[1]:
            yield match[1], match.start(), place
        elif match[2]:
            word = name[place : place + int(match[2][:4])]
            if word.isidentifier():
                place += len(word)
                yield word, match.start(), place


FAMILIES = (
    "gemm", "attention", "convolution", "normalization", "softmax", "elementwise", "reduction", "copy",
    "optimizer", "embedding", "sort", "routing", "epilogue", "collective", "memory", "other",
)  # fmt: skip
"""The families. "sort" sorts, scans and selects; "routing" assigns tokens to experts; "epilogue" is what cuBLAS
and cuDNN run beside a matmul or convolution; "memory" is memcpys, memsets and the kernels that a driver runs for
them."""

_NAMES = 10_000  # distinct names that are parsed, at 0.1 ms each; real traces have hundreds

# The first that is found decides. Names are in lower case.
_PATTERNS = tuple(
    (family, re.compile(pattern))
    for family, pattern in (
        ("copy", r"reshape_and_cache"),
        # foreach kernels update parameters and clip gradients
        ("optimizer", r"foreach|multi_tensor|adam|adagrad|lamb_|(?:^|_)sgd"),
        ("attention", r"flash|fmha|attention|attn|sdpa|mha_(?:fwd|bwd)|bwd_kernel_fuse"),
        (
            "convolution",
            r"^conv |[sh]cudnn|conv(?!ert)|wgrad|dgrad|fprop|winograd|im2col|col2im|fft2d|bwd_(?:weight|data)"
            r"|igemm_(?:fwd|bwd|wrw)|compute\w*offsetskernel",
        ),
        (
            "gemm",
            r"(?<!fb)gemm|gemv|cijk_?|nvjet|matmul|splitk|dot_kernel|(?:^|_)fc-|reduce_1block|_moe_kernel",
        ),
        ("softmax", r"soft_?max"),
        ("reduction", r"lp_?norm|norm_two|vector_norm|pool"),
        ("normalization", r"norm(?!al)|(?:^|_)bn_(?:bw|fw)|(?:^|_)ln_(?:fwd|bwd)|gammabeta|welford"),
        ("elementwise", r"rotary|rope_|swiglu|silu|gelu|relu|dropout|distribution_elementwise"),
        (
            "embedding",
            r"embedding|index_?select|gather(?!topk)|scatter|^elementwise: index|index_(?:put|add)|indexfunc"
            r"|indexing_backward|compute_grad_weight|krn_partial|segment|bounds_check_ind|linearize_index"
            r"|offsets_range",
        ),
        (
            "reduction",
            r"reduce|(?:^|_|: )(?:sum|mean|arg_?max|arg_?min)|nll_?loss|nllcriterion|cross_entropy|m(?:ax|in)_dim",
        ),
        (
            "copy",
            r"copy|catarray|(?:^|::)cat\W|transpose|nchw|nhwc|permute|cast|(?:^|_)(?:roll|flip)_|to_dense"
            r"|transdata|tensormove",
        ),
        ("epilogue", r"scalepackedtensor|globalkernel"),
        (
            "elementwise",
            r"elementwise|-dtype_|subtensorop|(?:mul|add|sub|div|fill|oneslike|equal)aicore|transform_kernel",
        ),
        ("routing", r"routing|expert|moe_?(?:align|sort)|dispatch_layout|expand_to_fused|fused_mapping"),
        (
            "sort",
            r"(?:radix|merge|block|bitonic)_?sort|block_merge|devicescan|devicecompact|lookback_scan|top_?k"
            r"|partition_kernel|searchsorted|(?:^|_)unique",
        ),
        ("memory", r"^__amd_rocclr_"),
    )
)
# Inductor names a kernel after all operators around it: only its kind and few words say what it does.
_INDUCTOR = re.compile(r"triton_(poi|red|per|tem|for)_")
_INDUCTOR_COPY = re.compile(r"triton_poi_fused_(?:_?(?:to_copy|clone|cat|copy|view|permute|transpose|t)_)+\d+")
_INDUCTOR_NORM = re.compile(r"norm|rsqrt|var_mean")


@lru_cache(4096)
def family(name: KernelName) -> str:
    """Return the family of a kernel that does not communicate."""
    short = name.short[:_SEARCHED].lower()
    if kind := _INDUCTOR.match(short):
        return _inductor(kind[1], short)
    composed = ": " in short or short.startswith(("conv ", "gemm "))
    text = short if composed else f"{short} {name.base[:_SEARCHED].lower()}"
    return next((name_of_family for name_of_family, pattern in _PATTERNS if pattern.search(text)), "other")


def _inductor(kind: str, name: str) -> str:
    if kind in ("red", "per"):
        return "softmax" if "softmax" in name else "normalization" if _INDUCTOR_NORM.search(name) else "reduction"
    if kind == "tem":
        return "attention" if "attention" in name else "gemm"
    return "copy" if _INDUCTOR_COPY.fullmatch(name) else "elementwise"


def add_names(gpu: Table, strings: Strings, texts: list[str]) -> None:
    """Fill the columns ``short_name`` and ``family`` of GPU work, and append their strings to ``texts``."""
    codes, rows = np.unique(gpu.name, return_inverse=True)
    kernel = np.zeros(len(codes), bool)
    kernel[rows[gpu.category == KERNEL]] = True
    named = codes[kernel][:_NAMES].tolist()
    shorts = short_names(texts[code] for code in named)
    short, kind = codes.copy(), np.where(kernel, strings["other"], strings["memory"])
    at = np.searchsorted(codes, named)
    short[at] = [strings[shorts[texts[code]]] for code in named]
    kind[at] = [strings[family(parse(texts[code]))] for code in named]
    gpu.short_name[:], gpu.family[:] = short[rows], kind[rows]
    gpu.family[communication_mask(gpu)] = strings["collective"]
    texts.extend(list(strings)[len(texts) :])
