"""Builds the sections of data that pages draw; a section is None if there is nothing for it."""
