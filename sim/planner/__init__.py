"""What a model would do on a machine that was never measured: `moe-sim plan`.

The times are those of `sim.prediction`, as the back-test's are: the same rates from data sheets, factors and engines.
This package says what fits where, which of these placements is fastest, and how far that can be trusted.
"""
