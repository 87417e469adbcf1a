"""What to fetch early: one file for each prefetcher."""
