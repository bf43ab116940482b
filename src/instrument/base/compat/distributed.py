"""The store of a job: torch.distributed offers no public access to the one that it was initialized with."""

from __future__ import annotations

from typing import Any

from ..interrupts import Suppressed


def job_store(prefix: str) -> Any:
    """Return a new connection to the store of this job, for keys that begin with ``prefix``.

    Without it, or in a job of one rank: None.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return None
    with Suppressed(AttributeError, RuntimeError, NotImplementedError):  # torch before 2.7 cannot clone a store
        from torch.distributed import distributed_c10d

        store: Any = distributed_c10d._get_default_store()
        return distributed_c10d.PrefixStore(prefix, store.clone())
    return None
