"""``python -m instrument``."""

from .cli import main

main()
