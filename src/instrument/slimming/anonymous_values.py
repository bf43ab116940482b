"""`AnonymousValues`: replaces the texts in the args of events and in the metadata of a trace."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from ..trace_marks import SLIM, STEPS
from .names import Id

_NUMBER = r"[-+]?\d{1,6}(?:\.\d*)?(?:[eE][-+]?\d{1,3})?"
_COLLECTIVE = (
    r"_?(?:all_?gather|all_?reduce|reduce_?scatter|all_?to_?all|broadcast|reduce|gather|scatter|send|recv|barrier)"
    r"(?:_?(?:into_tensor|base|tensor|coalesced|v|single|oop))*"
)
_VALUE = re.compile(  # types, numbers as text, names of collectives and of default process groups
    rf"|{_NUMBER}|\[(?:(?:{_NUMBER}|True|False|None)(?:, ?)?)*\]|True|False|None|{_COLLECTIVE}"
    r"|(?:c10::)?(?:complex<(?:float|double|(?:c10::)?Half)>|B?Float(?:16|8_e\dm\d\w{0,2}(?:fnuz|uz)?)?|Half)"
    r"|(?:un)?signed char|(?:long|short) int|Scalar(?:List)?|TensorList|GenericList|Device|Stream"
    r"|(?:float|half|double|u?int|long|short|char|byte|bool|complex)(?:\d{1,3}|float|double)?"
    r"|default_pg|ns|ms|nccl|gloo|ucc|mpi",
    re.IGNORECASE,
)
_CATEGORIES = re.compile(
    r"(?:cpu_op|operator|user_annotation|gpu_user_annotation|python_function|(?:cuda|mtia|xpu|privateuse1)_runtime"
    r"|cuda_driver|runtime|kernel|(?:gpu_)?mem(?:cpy|set)|mtia_ccp_events|cuda_sync|trace|overhead|cpu_instant_event)?",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"'.*'|\".*\"", re.DOTALL)
_NUMBERS = re.compile(r"[\d.]{1,20}")
_STEPS = re.compile(r"\d{1,9}-\d{1,9}")
_DEVICE_NAME = re.compile(r"[\w .()+-]*", re.ASCII)


class AnonymousValues:
    """Replaces texts that are no numbers, types or names of collectives.

    Args:
        stand_in: returns the stand-in of a text.
        mask: returns a name with stand-ins for its unknown words.
    """

    def __init__(self, stand_in: Callable[[str], str], mask: Callable[[str], str]) -> None:
        self._stand_in, self._mask = stand_in, mask

    def category(self, name: str | None) -> str | None:
        """Return the category, or "other" for one that torch does not have."""
        return name if _CATEGORIES.fullmatch(name or "") else "other"

    def json(self, text: str) -> str:
        """Return JSON text with stand-ins for the texts in it."""
        if '"' not in text:
            return text
        try:
            return json.dumps(self._all(json.loads(text)), separators=(",", ":"))
        except (ValueError, RecursionError):
            return '""'

    def metadata(self, about: Mapping[str, Any], lane: Callable[[Id], Id]) -> dict[str, Any]:
        """Return the metadata: numbers, and what is known of the devices, the process groups and the slim trace.

        Args:
            about: the metadata.
            lane: returns the stand-in of the id of a process or thread.
        """
        found: dict[str, Any] = {}
        for key, value in about.items():
            if key == "deviceProperties" and isinstance(value, list):
                found[key] = [self._device(each) for each in value]
            elif key == "distributedInfo" and isinstance(value, dict):
                found[key] = self._groups(value)
            elif key == SLIM and isinstance(value, dict):
                found[key] = self._note(value, lane)
            elif _is_number(value) or (key == STEPS and _STEPS.fullmatch(str(value))):
                found[key] = value
        return found

    def _device(self, device: Mapping[str, Any]) -> dict[str, Any]:
        found = {key: value for key, value in device.items() if key != "name" and _is_number(value)}
        if isinstance(name := device.get("name"), str):
            found["name"] = self._mask(name) if _DEVICE_NAME.fullmatch(name) else f"GPU {self._stand_in(name)}"
        return found

    def _groups(self, info: Mapping[str, Any]) -> dict[str, Any]:
        known = {name: self._all(info[name]) for name in ("backend", "rank", "world_size") if name in info}
        if isinstance(groups := info.get("pg_config"), list):
            kept = [each for each in groups if isinstance(each, dict)]
            names = ("pg_name", "pg_size", "ranks")
            known["pg_config"] = [{name: self._all(each[name]) for name in names if name in each} for each in kept]
        return known

    def _note(self, note: Mapping[str, Any], lane: Callable[[Id], Id]) -> dict[str, Any]:
        found: dict[str, Any] = {"events": note["events"]} if _is_number(note.get("events")) else {}
        if isinstance(lost := note.get("lost"), dict):
            found["lost"] = _numbers(lost, "events", "bytes", "repaired")
            if isinstance(reasons := lost.get("reasons"), dict):
                found["lost"]["reasons"] = self._reasons(reasons)
        if isinstance(lanes := note.get("lanes"), list):
            rows = [each for each in lanes if isinstance(each, list) and len(each) == 3]
            found["lanes"] = [
                list(map(lane, row)) for row in rows if not any(isinstance(each, (list, dict)) for each in row)
            ]
        if isinstance(steps := note.get("steps"), dict):
            found["steps"] = _numbers(steps, "first", "last", "kept", "of")
        return found

    def _reasons(self, reasons: Mapping[str, Any]) -> dict[str, Any]:
        """Return why parts of the file could not be read, without the texts that are quoted from it."""
        found: dict[str, Any] = {}
        for reason, count in reasons.items():
            known = self._mask(_QUOTED.sub("'...'", str(reason)))
            if type(count) is int:
                found[known] = found.get(known, 0) + count
        return found

    def _all(self, value: Any) -> Any:
        """Return a JSON value with stand-ins for all texts but numbers, types and names of collectives."""
        if isinstance(value, str):
            return value if _VALUE.fullmatch(value) else self._stand_in(value)
        if isinstance(value, list):
            return [self._all(each) for each in value]
        if isinstance(value, dict):
            return {self._all(key): self._all(each) for key, each in value.items()}
        return value


def _numbers(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names if _is_number(values.get(name))}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, str) and bool(_NUMBERS.fullmatch(value)))
