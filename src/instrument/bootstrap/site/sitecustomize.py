"""Brings `instrument run` into the Python processes of a program; the folder of this file is on ``PYTHONPATH``."""

import os
import sys


def _hidden() -> None:
    """Run the ``sitecustomize`` that this one hides, with a ``sys.path`` as without this folder."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    this = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        sys.modules["sitecustomize"] = this
        if error.name != "sitecustomize":
            raise


def _other() -> bool:
    """Tell whether the program has a module ``instrument`` of its own, which ours would stand in for."""
    first = next((word for word in sys.orig_argv[1:] if word in ("-m", "-c") or os.path.isfile(word)), "")
    script = "" if first in ("-m", "-c") else first
    for name in ("instrument.py", os.path.join("instrument", "__init__.py")):
        own = os.path.join(os.path.dirname(script), name)
        if os.path.isfile(own) and not os.path.isdir(os.path.join(os.path.dirname(own), "bootstrap", "site")):
            sys.stderr.write(f"instrument: nothing is recorded, as {own!r} has that name too\n")
            return True
    return False


def _begin() -> None:
    if _other():
        return
    try:
        from instrument.bootstrap.begin import begin
    except ImportError as error:  # another Python, which has no instrument; helpers of a program may be that
        if os.environ.get("INSTRUMENT_RUN_PROCESS") == str(os.getpid()):
            python = sys.executable or "this Python"
            sys.stderr.write(f"instrument: nothing is recorded: install instrument for {python} ({error})\n")
        return
    begin()


def _site() -> None:
    try:
        _hidden()
    finally:
        try:
            _begin()
        except Exception as error:  # nothing of the library is there to say it
            sys.stderr.write(f"instrument: nothing is recorded: {error!r}\n")


_site()
