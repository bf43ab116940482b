"""Makes torchvision importable with a torch without CUDA, in the environment that runs this module.

If the package index has torchvision for CUDA only, its library of operators cannot be loaded, and the import
fails because the operator `nms` is not declared. Datasets, transforms and models do not need its operators.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

DECLARATIONS = """

if not _has_ops():  # added by scripts/public_scripts
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def _import() -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True)


def main() -> None:
    """Declare the operators in the installed torchvision if it cannot be imported."""
    done = _import()
    if done.returncode and "torchvision::nms" in done.stderr:
        spec = importlib.util.find_spec("torchvision")
        assert spec is not None and spec.origin is not None
        extension = Path(spec.origin).with_name("extension.py")
        extension.write_text(extension.read_text(encoding="utf-8") + DECLARATIONS, encoding="utf-8")
        print("public-scripts: torchvision is built for CUDA; its operators are declared, not loaded")
        done = _import()
    if done.returncode:
        sys.exit(f"public-scripts: torchvision cannot be imported: {done.stderr.strip().splitlines()[-1]}")


if __name__ == "__main__":
    main()
