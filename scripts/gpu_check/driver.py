"""Nothing initializes the driver, or makes a context, before the program does."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

from .check import Figures, Given, expect, python, recorded

PROGRAM = "scripts.gpu_check.programs.environment"


def environment(given: Given) -> Figures:
    """Under `instrument run` a program that hides the GPU after ``import torch`` has none, as without it."""
    plain = python("-m", PROGRAM).stdout
    run = ("-m", "instrument", "run", "--steps", "2-3", "--out", given.folder / "run", "--", "-m", PROGRAM)
    under = python(*run).stdout
    expect(under == plain, f"printed {under!r} instead of {plain!r}")
    expect("no GPU" in plain, f"without instrument the program has a GPU that it hid: {plain!r}")
    recorded(given.folder / "run", [2, 3])
    return {"printed": plain.splitlines()[-1]}


def fork(given: Given) -> Figures:
    """A child that is forked after a profile is made uses the GPU, and so does its parent then."""
    import instrument

    from .network import Training

    prof = instrument.profile(given.folder / "run", schedule=instrument.schedule(at="2-3"))
    loop = instrument.steps(range(3), given.folder / "other")
    detector = instrument.detect_syncs()
    expect(not given.cuda.is_initialized(), "CUDA is initialized by what was made so far")
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_train, args=(given.device, send))
    child.start()
    expect(receive.poll(40), "the child did not answer in 40 s")
    answer = receive.recv()
    child.join(10)
    expect(answer == "trained", f"the child could not train: {answer}")
    del loop, detector
    training = Training(given.device)
    with prof:
        for _ in range(5):
            training.step()
            prof.step()
    recorded(given.folder / "run", [2, 3])
    kernels = _kernels(given)
    expect(kernels, "the parent's window has no kernels")
    return {"kernels": kernels}


def _train(device: str, send: Connection) -> None:
    from .network import Training

    try:
        Training(device).step().item()
        answer = "trained"
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    send.send(answer)


def _kernels(given: Given) -> int:
    import instrument

    return len(instrument.read_trace(given.trace(given.folder / "run")).kernels)


def untouched(given: Given) -> Figures:
    """A window of a loop on the CPU leaves CUDA as it is: not initialized, and without a context."""
    import torch

    import instrument

    from .network import Training

    training = Training("cpu")
    with instrument.profile(given.folder / "run", schedule=instrument.schedule(at="2-3")) as prof:
        for _ in range(5):
            training.step()
            prof.step()
    expect(not given.cuda.is_initialized(), "CUDA is initialized")
    context = not given.rehearsal and torch._C._cuda_hasPrimaryContext(0)
    expect(not context, "there is a context on the first GPU")
    recorded(given.folder / "run", [2, 3])
    return {"initialized": False, "context": context}
