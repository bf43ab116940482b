"""Numbers and regions of a step that a project holds: the files, what moved, limits. Never imports torch."""
