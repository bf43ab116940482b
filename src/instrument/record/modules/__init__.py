"""Names the parts of a model, and of the step around it, without a change to their source."""
