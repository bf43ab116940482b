"""The dry run: finds the synchronizations of a GPU training step on a machine without a GPU."""
