"""What other tests leave behind in torch is put right before each of these."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def distributions_check() -> None:
    """Check the arguments of distributions, as torch does until something is compiled for the first time."""
    torch.distributions.Distribution.set_default_validate_args(True)
