"""Adapters that record a framework's training by one line; each drives a `Loop`."""
