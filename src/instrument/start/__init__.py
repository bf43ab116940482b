"""Starts the library without an edit: commands, launches under profilers, code inside a started program."""
