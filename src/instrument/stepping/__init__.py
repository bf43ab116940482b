"""Counts the steps of a program that does not mark them: optimizer steps, calls of a model or a function."""
