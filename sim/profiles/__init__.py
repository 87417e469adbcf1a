"""Durations and sizes: machines, measured rates, rooflines, precisions; of models see `traces.models`."""
