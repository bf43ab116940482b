"""Runs a program under a vendor's profiler: command lines, reports and installed tools."""
