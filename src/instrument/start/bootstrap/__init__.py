"""Finds and records the steps of an unchanged program, in each Python process of ``instrument run``."""
