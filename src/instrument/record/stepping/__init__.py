"""Counts the steps of a program that does not mark them: by optimizer steps, or calls of a model or a function."""
