"""Runs public training scripts plain and under `instrument`, and compares what they print and what is found."""
