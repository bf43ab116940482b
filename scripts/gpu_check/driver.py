"""The library neither initializes the driver nor creates a context before the program does."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

from .check import CheckContext, expect, python, recorded

PROGRAM = "scripts.gpu_check.programs.environment"


def environment(context: CheckContext) -> None:
    """Under `instrument run`, a program that hides the GPU after ``import torch`` has none, as usual."""
    plain = python("-m", PROGRAM).stdout
    run = ("-m", "instrument", "run", "--steps", "2-3", "--out", context.folder / "run", "--", "-m", PROGRAM)
    under = python(*run).stdout
    alike = sum(line == other for line, other in zip(plain.splitlines(), under.splitlines(), strict=False))
    context.note("lines printed alike", alike, len(plain.splitlines()))
    expect(under == plain, f"printed {under!r} instead of {plain!r}")
    expect("no GPU" in plain, f"without instrument the program has a GPU that it hid: {plain!r}")
    recorded(context.folder / "run", [2, 3])


def fork(context: CheckContext) -> None:
    """Children forked after a profile is created, after it is entered, and in a window use the GPU.

    Their parent uses it as well. In a window of torch up to 2.12 children cannot: its profiler initializes CUDA.
    """
    import torch

    import instrument

    from .network import Training

    plan = instrument.schedule(at="2-3")
    prof = instrument.profile(context.folder / "run", schedule=plan)
    loop = instrument.steps(range(3), context.folder / "other")
    detector = instrument.detect_syncs()
    answers = {"made": _forked(context)}
    with prof:
        prof.step()
        answers["entered"] = _forked(context)
        prof.step()
        if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
            answers["in a window"] = _forked(context)
        expect(not context.cuda.is_initialized(), "CUDA is initialized, and the program has not used it")
        for _ in range(2):
            prof.step()
    del loop, detector
    recorded(context.folder / "run", [2, 3])
    context.note("children that used the GPU", [*answers.values()].count("trained"), len(answers))
    failed = {when: answer for when, answer in answers.items() if answer != "trained"}
    expect(not failed, f"children that could not train: {failed}")
    Training(context.device).step().item()


def _forked(context: CheckContext) -> str:
    """Return the answer of a forked child: "trained", or its error."""
    forking = multiprocessing.get_context("fork")
    receive, send = forking.Pipe(duplex=False)
    child = forking.Process(target=_train, args=(context.device, send))
    child.start()
    expect(receive.poll(15), "a child did not answer in 15 s")
    answer: str = receive.recv()
    child.join(10)
    return answer


def _train(device: str, send: Connection) -> None:
    from .network import Training

    try:
        if device == "cuda":
            import torch

            torch.cuda.init()
        Training(device).step().item()
        answer = "trained"
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    send.send(answer)


def untouched(context: CheckContext) -> None:
    """A window of a CPU loop neither initializes CUDA nor creates a context."""
    import torch

    import instrument

    from .network import Training

    training = Training("cpu")
    with instrument.profile(context.folder / "run", schedule=instrument.schedule(at="2-3")) as prof:
        for _ in range(5):
            training.step()
            prof.step()
    expect(not context.cuda.is_initialized(), "CUDA is initialized")
    has_context = not context.rehearsal and torch._C._cuda_hasPrimaryContext(0)
    context.note("contexts on the first GPU", int(has_context), 0)
    expect(not has_context, "there is a context on the first GPU")
    recorded(context.folder / "run", [2, 3])
