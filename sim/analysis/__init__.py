"""Why a result is as it is: misses by cause, curves."""
