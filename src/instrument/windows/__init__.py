"""The schedule of windows, the profile that follows it, and the manifest of the outcomes."""
