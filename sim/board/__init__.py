"""The board: policies over fixed traces, sizes and machines, ranked by one score: `moe-sim board`."""
