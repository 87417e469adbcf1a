"""One loop: steps from a schedule, decisions from policies and residency, work on a device. No clock, no hardware."""
