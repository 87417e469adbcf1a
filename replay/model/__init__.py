"""The model that computes: dense part, experts, kernels, and weights from a checkpoint."""

DENSE = ("real", "none")  # whether a model's dense part is computed beside its experts
