"""Builds the sections of the page of a diagnosis; a section is None if the trace has nothing for it."""
