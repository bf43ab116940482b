"""The profile of a loop: counts its steps, opens, records and ends windows, and decides the outcome of each."""
