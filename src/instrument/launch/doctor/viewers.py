"""Whether what was recorded can be looked at from here."""

from __future__ import annotations

import threading
import urllib.request
from urllib.error import HTTPError

from .check import Check
from .machine import Machine

_LIMIT_S = 2.0


def perfetto(machine: Machine) -> Check:
    """Whether Perfetto can be reached from this machine; a trace can as well be opened on another one."""
    answers = _reached(machine.viewer)
    facts = {"reachable": answers}
    if answers:
        return Check("ok", f"{machine.viewer} can be reached", facts=facts)
    sentence = f"{machine.viewer} cannot be reached from here: open traces on a machine with a browser"
    return Check("note", sentence, facts=facts)


def _reached(address: str) -> bool:
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_LIMIT_S).close()
        except HTTPError as error:
            error.close()  # it answered
        except (OSError, ValueError):
            return
        answered.set()

    # Names are looked up without a limit: that may take half a minute where there is no network.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_LIMIT_S)
    return answered.is_set()


def tensorboard(machine: Machine) -> Check:
    """Whether TensorBoard shows traces of torch.profiler."""
    plugin, version = machine.package("torch-tb-profiler"), machine.package("tensorboard")
    facts = {"tensorboard": version, "torch_tb_profiler": plugin}
    if plugin and version:
        return Check("ok", f"tensorboard {version} with torch-tb-profiler {plugin}", facts=facts)
    if plugin:
        return Check(
            "problem", f"torch-tb-profiler {plugin} without TensorBoard", "pip install tensorboard", facts
        )
    return Check(
        "absent", "torch-tb-profiler is not installed; pip install tensorboard torch-tb-profiler", facts=facts
    )
