"""The tables of a trace: columns, the links between their rows, and the threads, steps and names in them."""
