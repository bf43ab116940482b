"""Writes planes of XPlane files: of a host and of a GPU."""

from __future__ import annotations

from collections.abc import Mapping

from .protobuf import message

Event = tuple[str, int, int, Mapping[str, int]]  # name, start and duration in us, stats


def plane(name: str, lines: Mapping[str, list[Event]], **stats: int) -> bytes:
    """Return a plane whose lines begin at 1 ms."""
    names = {each[0]: number for number, each in enumerate((each for own in lines.values() for each in own), 7)}
    keys = dict.fromkeys([*stats, *(key for own in lines.values() for each in own for key in each[3])])
    number = {key: place for place, key in enumerate(keys, 300)}

    def event(each: Event) -> bytes:
        own = [(4, message((1, number[key]), (4, value))) for key, value in each[3].items()]
        return message((1, names[each[0]]), (2, each[1] * 10**6), (3, each[2] * 10**6), *own)

    return message(
        (1, 2),
        (2, name),
        *((3, message((1, place), (2, lane), (3, 10**6), *((4, event(each)) for each in own)))
          for place, (lane, own) in enumerate(lines.items())),
        *((4, message((1, code), (2, message((1, code), (2, text))))) for text, code in names.items()),
        *((5, message((1, code), (2, message((1, code), (2, text))))) for text, code in number.items()),
        *((6, message((1, number[key]), (3, value))) for key, value in stats.items()),
    )  # fmt: skip


HOST = plane(
    "/host:CPU",
    {
        "python": [
            ("train", 0, 100, {"_r": 1, "step_num": 5}),
            ("mine", 10, 80, {}),
            ("$train.py:12 main", 1, 98, {}),
        ],
        "tf_XLATfrtGpuClient/1": [("hipModuleLaunchKernel", 12, 4, {"correlation_id": 900})],
    },
)
GPU = plane(
    "/device:GPU:1",
    {
        "Stream #14(Compute)": [("fusion_2", 20, 30, {"correlation_id": 900}), ("MemcpyH2D", 51, 5, {})],
        "XLA Ops": [("fusion_2", 20, 30, {})],
    },
)
