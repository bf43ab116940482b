"""The forecast: how long a step takes on a GPU that is not there, from measured operators, and with its error."""
