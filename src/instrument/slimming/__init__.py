"""The smallest trace with the same metrics and findings."""
