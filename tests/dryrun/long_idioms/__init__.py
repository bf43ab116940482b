"""Long idioms of training and inference code, and lookalikes that do not synchronize, to score a detector by."""

from . import clean_logging_and_text, clean_losses_and_data, sync_logging_and_text, sync_losses_and_data

SYNCHRONISING = sync_logging_and_text.IDIOMS | sync_losses_and_data.IDIOMS
CLEAN = clean_logging_and_text.IDIOMS | clean_losses_and_data.IDIOMS
