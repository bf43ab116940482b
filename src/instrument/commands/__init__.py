"""What the command ``instrument`` can do: a module for each."""
