"""A file system for fsspec that fails or hangs on command; other processes find it by its entry point."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem


class FlakyFileSystem(LocalFileSystem):
    """Local files; each write obeys an order, such as a file "fail-1", in the folder FLAKY_ORDERS."""

    protocol = "flaky"

    def put_file(self, *arguments: Any, **options: Any) -> None:
        """Copy a file unless there is an order."""
        _take_order()
        super().put_file(*arguments, **options)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.removeprefix("flaky://") if isinstance(path, str) else path)


def _take_order() -> None:
    orders = Path(os.environ["FLAKY_ORDERS"])
    for order in sorted(orders.glob("fail-*")):
        order.unlink()
        raise OSError(f"no route to flaky://user:secret@host, by order {order.name}")
    while list(orders.glob("hang")):
        (orders / "hangs").touch()
        time.sleep(0.05)
