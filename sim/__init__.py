"""Time: the SimPy model of GPU memory, host link and compute, sweeps over it, and their plots. No torch."""
