"""Finds the lines that make the CPU wait for the GPU, in a program that runs; never reads a trace."""
