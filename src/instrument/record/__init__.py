"""Names code and records steps, in the training process; never reads a trace."""
