"""Many runs: setup, grid, workers, what is finished on disk, and the winner."""
