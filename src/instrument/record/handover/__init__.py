"""Hands recorded windows over to the process that finishes them, and writes their lines into the manifest."""
