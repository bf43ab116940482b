"""Replays a trace, unchanged and with changes, to predict what a change of the program would win."""
