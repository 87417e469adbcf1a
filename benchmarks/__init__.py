"""Speeds, as ratios of two things measured in turn in one run: machines differ and are shared, ratios hold."""
