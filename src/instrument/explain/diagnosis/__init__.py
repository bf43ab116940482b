"""Diagnoses a trace: the verdict, what rules find, the longest regions and gaps, as data and as JSON."""
