"""How a person sees it."""

from ..imports import import_rich

import_rich()  # before the modules here import it
