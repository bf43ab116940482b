"""Runs in the process beside the training, which finishes windows; never imported by the training."""
