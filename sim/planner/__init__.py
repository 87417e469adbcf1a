"""What a model would do on a machine that was never measured: `moe-sim plan`."""
