"""Answers the questions of agents about recordings, over the Model Context Protocol."""
