"""What to keep: one file for each eviction policy."""
