"""Runs public training scripts plain and under `instrument`, and compares their output and results."""
