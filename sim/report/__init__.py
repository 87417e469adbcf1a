"""One page about results that can be handed to somebody: `moe-sim report`."""
