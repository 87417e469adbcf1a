"""Simulator against device: the same cells on both, in closed loop and in lockstep."""
