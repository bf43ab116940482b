"""Profile a matmul and an addition: small or large, cold or warm, eager or compiled."""

import argparse
from pathlib import Path

import torch

import instrument

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def matmul_add(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.add(torch.matmul(x, w), b)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--compile", action="store_true", help="compile the function with torch.compile")
    parser.add_argument("--warmup", action="store_true", help="run a few steps before recording")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, w, b = torch.randn(3, args.size, args.size, dtype=DTYPES[args.dtype], device=device)
    step = torch.compile(matmul_add) if args.compile else matmul_add

    # Cold: the first call is recorded, with the work that is done only once.
    wait, warmup = (2, 1) if args.warmup else (0, 0)
    start, mode = "warm" if args.warmup else "cold", "compiled" if args.compile else "eager"
    name = f"{args.size}_{args.dtype}_{start}_{mode}"

    def keep(prof: torch.profiler.profile) -> None:
        table = prof.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=10)
        print(table)
        Path(f"runs/{name}.txt").write_text(table)
        prof.export_chrome_trace(f"runs/{name}.json")

    schedule = instrument.schedule(wait=wait, warmup=warmup, active=3, repeat=1)
    with instrument.profile(f"runs/{name}", schedule=schedule, on_trace_ready=keep) as prof:
        for _ in range(wait + warmup + 3):
            with instrument.annotate("matmul_add"):
                step(x, w, b)
            prof.step()


if __name__ == "__main__":
    main()
