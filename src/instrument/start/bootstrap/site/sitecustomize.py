"""Starts `instrument run` in the Python processes of a program; the folder of this file is on ``PYTHONPATH``."""

import os
import sys


def _run_hidden() -> None:
    """Run the ``sitecustomize`` that this one hides, with this folder removed from ``sys.path``."""
    this_folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != this_folder]
    this = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        sys.modules["sitecustomize"] = this
        if error.name != "sitecustomize":
            raise


def _say(text: str) -> None:
    """Write a line to standard error, past its buffer, which Python could not empty if nobody reads it."""
    try:
        os.write(sys.stderr.fileno(), f"instrument: {text}\n".encode(errors="backslashreplace"))
    except (OSError, ValueError, AttributeError):  # it is broken, closed or None
        return


def _name_is_taken() -> bool:
    """Return whether the program has its own module ``instrument``, which this library must not replace."""
    first = next((word for word in sys.orig_argv[1:] if word in ("-m", "-c") or os.path.isfile(word)), "")
    script = "" if first in ("-m", "-c") else first
    for name in ("instrument.py", os.path.join("instrument", "__init__.py")):
        own = os.path.join(os.path.dirname(script), name)
        ours = os.path.join(os.path.dirname(own), "start", "bootstrap", "site")
        if os.path.isfile(own) and not os.path.isdir(ours):
            _say(f"nothing is recorded, because {own!r} has the same name")
            return True
    return False


def _begin() -> None:
    if _name_is_taken():
        return
    try:
        from instrument.start.bootstrap.begin import begin
    except ImportError as error:  # another Python without instrument, as a helper program may be
        if os.environ.get("INSTRUMENT_RUN_PROCESS") == str(os.getpid()):
            python = sys.executable or "this Python"
            _say(f"nothing is recorded: install instrument for {python} ({error})")
        return
    begin()


def _site() -> None:
    try:
        _run_hidden()
    finally:
        try:
            _begin()
        except Exception as error:  # the library is not there to log it
            _say(f"nothing is recorded: {error!r}")


_site()
