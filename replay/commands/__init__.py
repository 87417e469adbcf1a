"""The commands of `moe-replay` beside the replay itself."""
