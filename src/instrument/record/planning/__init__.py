"""Which steps are recorded, on which ranks: the schedule, and what opens further windows while the loop runs."""
