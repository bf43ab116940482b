"""Names code and records steps, in the training process; never parses a trace."""
