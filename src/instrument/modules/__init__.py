"""Name the parts of a model, and of the step around it, that nobody edited."""
