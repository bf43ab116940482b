"""The sections of the page of a diagnosis; each module makes one, or None where the trace has nothing for it."""
