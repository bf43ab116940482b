"""Makes torchtitan, which needs an accelerator, take the CPU for one on a machine without."""

import torch

ALONE = not torch.cuda.is_available()

if ALONE:
    torch._utils._get_available_device_type = lambda: "cpu"
