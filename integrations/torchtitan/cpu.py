"""torchtitan means to run on an accelerator; where there is none, it is told that the CPU is one."""

import torch

ALONE = not torch.cuda.is_available()

if ALONE:
    torch._utils._get_available_device_type = lambda: "cpu"
