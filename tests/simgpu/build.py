"""Builds the simulated GPU.

The wheels of the CUDA build of torch have the headers, and the libraries whose functions are to be replaced. The
result is libcudart, which holds everything, and libraries under the names of the others that lead to it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
LIBRARY = "libcudart.so.13"
OTHER_LIBRARIES = ("libcupti.so.13", "libcublasLt.so.13", "libcublas.so.13", "libcuda.so.1", "libnvidia-ml.so.1",
                   "libnccl.so.2")  # fmt: skip
COMPILE = ("-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-missing-field-initializers")

# What a function that is not implemented returns.
NOT_SUPPORTED = {"cudart": 801, "cuda": 801, "cupti": 17, "cublas": 15, "nccl": 5}


def run(*command: object) -> str:
    """Run a command at a low priority and return its output; SystemExit with what it says if it fails."""
    done = subprocess.run(["nice", *map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    if done.stderr:
        sys.stderr.write(done.stderr)
    return done.stdout


def write_if_changed(path: Path, text: str) -> None:
    """Write a file, or leave its time as it is where it has this text."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def is_older(path: Path, sources: Iterable[Path]) -> bool:
    """Return whether a file has to be made again from its sources."""
    return not path.exists() or any(source.stat().st_mtime > path.stat().st_mtime for source in sources)


def functions_of(binary: Path, dynamic: bool = True) -> set[str]:
    """Return the names of the functions that a library or an object file defines."""
    lines = run("nm", *(["-D"] if dynamic else []), "--defined-only", binary).splitlines()
    symbols = (fields for fields in map(str.split, lines) if len(fields) == 3)
    return {name.split("@")[0] for _, kind, name in symbols if kind in "TtWi"}


def functions_of_driver(header: Path) -> set[str]:
    """Return the names of the driver's functions, whose library no wheel has, with those that macros give them."""
    text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
    renamed = dict(re.findall(r"#define\s+(cu\w+)\s+(cu\w+)\s*$", text, re.MULTILINE))
    declared = set(re.findall(r"CUresult\s+CUDAAPI\s+(cu\w+)\s*\(", text))
    return declared | {renamed[name] for name in declared if name in renamed} | set(renamed.values())


def stubs(toolkit: Path, nccl: Path, defined: set[str]) -> str:
    """Return C code of a function for each that a real library has and the simulation has not."""
    kernels_of_blas = re.compile(
        r"cublas(?!Lt|Xt|Get|Set|Create|Destroy|Logger|Init|Shutdown|Alloc|Free|Migrat|Xerbla)"
    )
    libraries = {
        "cudart": functions_of(toolkit / "lib/libcudart.so.13"),
        "cupti": functions_of(toolkit / "lib/libcupti.so.13"),
        "cublas": functions_of(toolkit / "lib/libcublas.so.13") | functions_of(toolkit / "lib/libcublasLt.so.13"),
        "cuda": functions_of_driver(toolkit / "include/cuda.h"),
        "nccl": functions_of(nccl / "lib/libnccl.so.2"),
    }
    lines = [
        "int simgpu_missing(const char*, int);",
        "int simgpu_blas(const char*, void*, long, long, long);",
        '#define E __attribute__((visibility("default")))',
    ]
    seen = set(defined)
    for library, names in libraries.items():
        for name in sorted(names - seen):
            if library in ("cublas", "nccl") and not name.startswith((library, f"p{library}")):
                continue
            seen.add(name)
            if library == "cublas" and kernels_of_blas.match(name):
                arguments = "void* handle, long a, long b, long m, long n, long k"
                lines.append(f'E int {name}({arguments}) {{ return simgpu_blas("{name}", handle, m, n, k); }}')
            else:
                code = NOT_SUPPORTED[library]
                lines.append(f'E int {name}(void) {{ return simgpu_missing("{name}", {code}); }}')
    return "\n".join(lines) + "\n"


def callback_names(include: Path) -> str:
    """Return C++ tables of the names of what CUPTI calls back for, by their numbers."""

    def table(library: str) -> str:
        text = (include / f"cupti_{library}_cbid.h").read_text()
        found = re.findall(rf"CUPTI_{library.upper()}_TRACE_CBID_(\w+)\s*=\s*(\d+)", text)
        names = {int(number): name for name, number in found if name not in ("INVALID", "SIZE", "FORCE_INT")}
        cells = (f'"{names[number]}"' if number in names else "nullptr" for number in range(max(names) + 1))
        return f"static const char* const {library}_names[] = {{{', '.join(cells)}}};\n"

    return table("runtime") + table("driver")


def compile_all(sources: Sequence[Path], includes: Sequence[Path], work: Path) -> list[Path]:
    """Compile the sources that changed, two at a time, and return all object files."""
    shared = [*NATIVE.glob("*.h"), work / "callback_names.inc"]

    def compile_one(source: Path) -> Path:
        target = work / f"{source.stem}.o"
        if is_older(target, [source, *shared]):
            system = (f"-isystem{include}" for include in includes)
            run("g++", "-std=c++17", *COMPILE, *system, "-I", work, "-c", source, "-o", target)
        return target

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, sources))


def build(site_packages: Path, out: Path) -> None:
    """Build the libraries, or what of them is older than its sources, from the wheels into ``out``."""
    toolkit, nccl = site_packages / "nvidia/cu13", site_packages / "nvidia/nccl"
    if not (toolkit / "include/crt/host_defines.h").exists():
        raise SystemExit(f"{toolkit} lacks headers: pip install --no-deps nvidia-cuda-crt==13.0.*")
    work = out / "objects"
    work.mkdir(parents=True, exist_ok=True)
    write_if_changed(work / "callback_names.inc", callback_names(toolkit / "include"))
    objects = compile_all(sorted(NATIVE.glob("*.cpp")), (toolkit / "include", nccl / "include"), work)

    if is_older(work / "stubs.o", [*objects, Path(__file__)]):
        defined = set().union(*(functions_of(one, dynamic=False) for one in objects))
        (work / "stubs.c").write_text(stubs(toolkit, nccl, defined))
        run("gcc", "-O1", "-fPIC", "-fvisibility=hidden", "-c", work / "stubs.c", "-o", work / "stubs.o")
    objects.append(work / "stubs.o")

    if is_older(out / LIBRARY, objects):
        names = "cu*; __cuda*; nvml*; nccl*; pnccl*; sim_*"
        write_if_changed(work / "exports.map", f"{{ global: {names}; local: *; }};\n")
        unfinished = out / f"{LIBRARY}.new"  # a process may have the old one mapped
        run(
            "g++", "-shared", "-o", unfinished, *objects, f"-Wl,-soname,{LIBRARY}", "-Wl,--no-undefined",
            f"-Wl,--version-script={work / 'exports.map'}", "-ldl", "-lpthread", "-static-libstdc++",
            "-static-libgcc",
        )  # fmt: skip
        unfinished.replace(out / LIBRARY)
    (work / "empty.c").write_text("int simgpu_empty;\n")
    for name in OTHER_LIBRARIES:
        if not (out / name).exists():
            run(
                "gcc", "-shared", "-fPIC", "-fvisibility=hidden", "-o", out / name, work / "empty.c",
                f"-Wl,-soname,{name}", "-Wl,--no-as-needed", f"-L{out}", f"-l:{LIBRARY}", "-Wl,-rpath,$ORIGIN",
            )  # fmt: skip
