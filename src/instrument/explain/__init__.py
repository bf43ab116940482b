"""Says what the tables mean: metrics, waits, rules, replay, comparison; never imports torch, prints nothing."""
