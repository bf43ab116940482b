"""Finds the slow steps of a running loop, and the phase that made each slow, without a trace."""
