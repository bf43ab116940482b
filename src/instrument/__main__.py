"""``python -m instrument``."""

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # the current folder, where any file may have the name of a module

from .start.cli import main

main()
