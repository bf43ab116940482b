"""Terminal reports on traces."""

from ..imports import import_rich

import_rich()  # before the modules of this package import it
