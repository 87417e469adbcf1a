"""The model that computes: dense part, experts, kernels, and weights from a checkpoint."""

DENSE = ("real", "none")
"""Whether a model's dense part is computed beside its experts."""
