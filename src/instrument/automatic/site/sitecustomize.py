"""Brings `instrument run` into the Python processes of a program; the folder of this file is on ``PYTHONPATH``."""

import os
import sys


def _hidden() -> None:
    """Run the ``sitecustomize`` that this one hides, with a ``sys.path`` as without this folder."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    this = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        sys.modules["sitecustomize"] = this
        if error.name != "sitecustomize":
            raise


def _begin() -> None:
    try:
        from instrument.automatic.begin import begin
    except ImportError:  # another Python, which has no instrument
        return
    begin()


try:
    _hidden()
finally:
    _begin()
