"""Finds the lines that make the CPU wait for the GPU."""
