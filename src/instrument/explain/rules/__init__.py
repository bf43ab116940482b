"""The rules of `instrument.diagnose`, one function each, by where the time goes, and the facts that they read."""
