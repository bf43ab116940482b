"""Which steps are recorded? The schedule, the loop that follows it, and the record of what came of it."""
