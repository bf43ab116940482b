"""Reads what profilers and the allocator wrote, into tables; never imports torch, judges nothing."""
