"""A smaller trace with the same metrics and findings."""
