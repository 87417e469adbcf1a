"""Speeds, as ratios of two things measured in turn in one run: machines differ and are shared, ratios hold.

What a policy costs (`predictors`) is the exception: microseconds, which ship with the CPU's name.
"""
