"""The subcommands of the command ``instrument``, a module for each."""
