"""A run moment by moment, as a file for Perfetto."""
