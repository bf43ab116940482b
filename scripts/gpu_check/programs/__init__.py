"""Training scripts as users write them, which know nothing of `instrument`; the first argument is the device."""
