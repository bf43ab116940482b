"""How does my framework say it in one line? An adapter for each, which drives a `Loop`."""
