"""Caches in which other libraries keep whether there is a GPU."""

from __future__ import annotations

import functools
import sys
from typing import Any

_Cached = type(functools.lru_cache(lambda: None))
_PREDICATES = ("is_", "_is_", "has_", "_has_", "can_", "supports_")
_WORDS = ("cuda", "gpu", "accelerator", "nccl")


def forget() -> None:
    """Clear the caches of functions like ``is_..._available()`` that check for a GPU; 6 ms for 3,000 modules.

    The functions return True or False, so clearing their caches drops no object that a caller relies on.
    """
    for module in list(sys.modules.values()):
        for found in list(getattr(module, "__dict__", {}).values()):
            if type(found) is _Cached and _asks(found):
                found.cache_clear()


def _asks(cached: Any) -> bool:
    code = getattr(getattr(cached, "__wrapped__", None), "__code__", None)
    if code is None or not code.co_name.startswith(_PREDICATES):
        return False
    used = (code.co_name, *code.co_names)
    return any(word in name for name in used for word in _WORDS)
