"""What is this code called? Regions, and the emitters that turn them into each profiler's ranges."""
