"""Who records, and where does it go? Each exporter opens and closes a capture and hands off."""
