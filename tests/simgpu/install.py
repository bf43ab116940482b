"""Builds the simulated GPU into an environment: `python -m tests.simgpu.install VENV`.

The environment needs the CUDA build of torch with its wheels. Its processes have the simulated GPU where SIMGPU=1.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.simgpu.build import build


def install(environment: Path) -> None:
    """Build the libraries into the site-packages of an environment, and the files that load them."""
    found = sorted(environment.glob("lib/python3*/site-packages"))
    if not found:
        raise SystemExit(f"{environment} is not a virtual environment: it has no lib/python3*/site-packages")
    site_packages = found[0]
    build(site_packages, site_packages / "simgpu_lib")
    for name in ("boot", "settings", "values", "values_cuda"):
        shutil.copyfile(Path(__file__).with_name(f"{name}.py"), site_packages / f"simgpu_{name}.py")
    (site_packages / "simgpu.pth").write_text("import simgpu_boot\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    install(Path(sys.argv[1]))
