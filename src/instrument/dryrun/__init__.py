"""The dry run: finds synchronisations of a GPU training step on a machine without a GPU."""
