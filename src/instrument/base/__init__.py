"""Errors, settings, containment, patches and private names of torch; nothing of the other wings."""
