"""Reads what profilers and the allocator wrote, into tables; never imports torch, yields no findings."""
