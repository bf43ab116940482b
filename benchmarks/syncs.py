"""Measures the cost and the accuracy of detecting synchronizations without a GPU: ``make bench``."""

from __future__ import annotations

import json
import resource
import runpy
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from measure import ROUNDS, show, verdict
from torch import nn

import instrument
from instrument.syncs import coverage
from instrument.syncs.budget import Budget
from instrument.syncs.dryrun.run import dry_run_context
from instrument.syncs.monitor import monitor

ROOT = Path(__file__).parents[1]
NO_GPU: dict[str, Any] = {"add": lambda listener: None, "remove": lambda listener: None}
FEW = max(ROUNDS // 2, 5)
SIZES: dict[str, Any] = {"vocab_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}


class Training:
    """A model, its optimizer, and a step of both on a batch that is there already."""

    def __init__(
        self, model: nn.Module, tokens: torch.Tensor, loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    ):
        self.model, self.tokens, self._loss = model.train(), tokens, loss
        self.optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step(self) -> float:
        """Return the time of a step in ns."""
        begin = time.perf_counter_ns()
        self._loss(self.model, self.tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter_ns() - begin

    def steps(self, number: int, times: list[float] | None = None) -> list[float]:
        """Return the times of several steps, added to ``times``."""
        times = [] if times is None else times
        times += [self.step() for _ in range(number)]
        return times


def example() -> Training:
    """The annotated transformer of the examples, with its batches."""
    with mock.patch.object(sys, "argv", ["", "--steps", "0"]):
        model = runpy.run_path(str(ROOT / "examples" / "transformer_annotated.py"))["model"]
    return Training(
        model,
        torch.randint(256, (16, 64)),
        lambda model, tokens: nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()),
    )


def causal(model: nn.Module) -> Training:
    """A language model of transformers."""
    return Training(
        model, torch.randint(1024, (4, 128)), lambda model, tokens: model(input_ids=tokens, labels=tokens).loss
    )


def llama() -> Training:
    """Llama with 4 layers of width 256."""
    config = transformers.LlamaConfig(**SIZES, hidden_size=256, intermediate_size=688, num_key_value_heads=2)
    return causal(transformers.LlamaForCausalLM(config))


def gpt2() -> Training:
    """GPT-2 with 4 layers of width 256."""
    config = transformers.GPT2Config(vocab_size=1024, n_embd=256, n_layer=4, n_head=4, n_positions=128)
    return causal(transformers.GPT2LMHeadModel(config))


def dry_run() -> None:
    """Compare a step in a dry run with the plain step, in turn, and measure the fixed cost of a dry run."""
    for name, build in {"annotated transformer": example, "Llama": llama, "GPT-2": gpt2}.items():
        training = build()
        times: dict[str, list[float]] = {"plain": [], "in a dry run": [], "dry run of one step, in all": []}
        on_gpu = [training.model, training.optimizer, training.tokens]
        for _ in range(FEW):
            training.step()
            times["plain"] += training.steps(3)
            begin = time.perf_counter_ns()
            instrument.dry_run(training.step, on_gpu=on_gpu).assert_max(0)
            times["dry run of one step, in all"].append(time.perf_counter_ns() - begin)
            inside: list[float] = []
            step = partial(training.steps, 4, inside)
            instrument.dry_run(step, on_gpu=on_gpu).assert_max(0)
            times["in a dry run"] += inside[1:]
        medians = {name: statistics.median(values) for name, values in times.items()}
        show(f"A step of {name}", medians, "plain")
        verdict("step in a dry run to plain", medians["in a dry run"] / medians["plain"], 3)


def counting() -> None:
    """Compare a step of a dry run that counts operators and memory with one that does not, in turn."""

    def train(seconds: list[float]) -> None:
        with torch.device("cuda"):
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=5000, n_layer=4))
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.randint(5000, (2, 64), device="cuda")
        for _ in range(4):
            begin = time.perf_counter_ns()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter_ns() - begin)

    for fake in (False, True):
        times: dict[str, list[float]] = {"not counted": [], "counted": []}
        for _ in range(FEW):
            for name, steps in times.items():
                inside: list[float] = []
                with dry_run_context(fake, Budget(None), counts=name == "counted") as run:
                    run.call(partial(train, inside))
                steps += inside[1:]
        medians = {name: statistics.median(values) for name, values in times.items()}
        show(f"A step of GPT-2 with 4 layers {'without' if fake else 'with'} data", medians, "not counted")
        verdict("counted step to one that is not", medians["counted"] / medians["not counted"], 1.3)


def llama_7b() -> None:
    """Measure a step of Llama 7B with shapes only, in a process of its own, with all its imports."""
    seconds, runs, peaks = [], [], []
    for _ in range(3):
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, __file__, "7b"], check=True, capture_output=True)
        seconds.append(time.perf_counter() - begin)
        run, peak = json.loads(done.stdout)
        runs.append(run)
        peaks.append(peak)
    print(f"\nA step of Llama 7B with fake=True: {statistics.median(runs):.2f} s, and the imports of its process")
    verdict("the process, with all counts", statistics.median(seconds), 12, "s")
    verdict("its peak memory", statistics.median(peaks), 500, "MB")


def child() -> None:
    """Run the step of `llama_7b`; print its time in s and the peak memory of the process in MB."""
    begin = time.perf_counter()

    def step() -> None:
        with torch.device("cuda"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig())
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.randint(32_000, (1, 512), device="cuda")
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        loss.item()

    report = instrument.dry_run(step, fake=True)
    assert [found.op for found in report.findings] == ["item"], report
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(json.dumps([time.perf_counter() - begin, peak]))


def scores() -> None:
    """Count synchronizing idioms that are found, and clean idioms that are reported."""
    sys.path.insert(0, str(ROOT))
    from tests.dryrun import long_idioms, unseen_idioms
    from tests.dryrun.test_idioms import waited

    def right(idiom: unseen_idioms.Idiom, waits: bool, fake: bool) -> bool:
        try:
            return waited(idiom.source, fake) == waits
        except Exception:  # an idiom that cannot be carried out is none that was told right
            return False

    print("\nIdioms in tests/dryrun, told right")
    for name, corpus in {"first": unseen_idioms, "second": long_idioms}.items():
        for fake in (False, True):
            found = [right(idiom, True, fake) for idiom in corpus.SYNCHRONISING.values()]
            passed = [right(idiom, False, fake) for idiom in corpus.CLEAN.values()]
            how = "fake=True" if fake else "with data"
            print(f"  {name}, {how}: {sum(found)} of {len(found)} wait, {sum(passed)} of {len(passed)} do not")
            verdict("missed", 100 * found.count(False) / len(found), 5, "%")
            verdict("false", passed.count(False), 0, "")


@contextmanager
def between_samples() -> Iterator[Any]:
    """Provide a detector as it is on steps that are not checked, without anything that needs a GPU."""
    pretended = (
        mock.patch.object(coverage, "reason_unavailable", lambda: None),
        mock.patch.multiple(monitor, **NO_GPU),
    )
    with pretended[0], pretended[1], instrument.detect_syncs(every=10**9) as syncs:
        for _ in range(4):
            syncs.step()
        yield syncs


def live() -> None:
    """Compare steps that are not checked with steps without a detector, in turn."""
    model, x = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), torch.randn(16, 64)
    training = Training(model, x, lambda model, x: model(x).sum())
    times: dict[str, list[float]] = {"plain": [], "not looked at": []}
    candidates: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "plain": nullcontext,
        "not looked at": between_samples,
    }
    for _ in range(ROUNDS * 4):
        for name, candidate in candidates.items():
            with candidate() as syncs:
                training.step()
                for _ in range(20):
                    begin = time.perf_counter_ns()
                    training.step()
                    if syncs is not None:
                        syncs.step()
                    times[name].append(time.perf_counter_ns() - begin)
    medians = {name: statistics.median(values) for name, values in times.items()}
    show("A step of 8 layers under detect_syncs", medians, "plain")
    verdict("step not looked at to plain", medians["not looked at"] / medians["plain"], 1.01)


if __name__ == "__main__":
    if sys.argv[1:] == ["7b"]:
        child()
    else:
        warnings.simplefilter("ignore")  # torch's own, of the idioms
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(1)  # more wait for each other where other programs have the cores
        print(f"\ntorch {torch.__version__}, Python {sys.version.split()[0]}, 1 thread")
        for part in (
            llama_7b,
            dry_run,
            counting,
            scores,
            live,
        ):  # a process begins with the peak of the one that starts it
            part()
