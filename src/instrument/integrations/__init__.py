"""Adapters that record a framework's training with one line of code; each drives a `Loop`."""
