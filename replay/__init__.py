"""A device: slots, copies, kernels and measured time, driven by the same policies as the simulator."""
