"""The model that computes: dense part, experts, kernels, and weights from a checkpoint."""
