"""From paths to traces: finds and unpacks files, picks readers, aligns the clocks of ranks, merges them."""
