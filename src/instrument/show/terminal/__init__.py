"""Terminal reports on traces."""

from ...base.imports import import_without_drawing

import_without_drawing("rich.style")  # before the modules of this package import it
