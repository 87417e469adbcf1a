"""Logarithms and logistic functions, nearly: plain arithmetic in single precision, done for several numbers at once."""

import numpy as np

from policies.core.compiled import compiled
from policies.core.policy import Single

ONE, FOUR = np.float32(1.0), np.float32(4.0)
A, B, C, D, F = (np.float32(1.0 / n) for n in (3, 5, 7, 9, 11))
SHARE, ZERO = np.float32(1.0 / 256.0), np.float32(0.0)


@compiled
def near_log(x: Single, factor: np.float32, eps: np.float32) -> None:
    """In place: the logarithm of factor x + eps, to a hundredth from 0.02 to 50 and less beyond.

    It is the begin of the series of 4 artanh z at z = (root - 1) / (root + 1).
    """
    for e in range(len(x)):
        root = np.sqrt(x[e] * factor + eps)
        z = np.true_divide(root - ONE, root + ONE)  # "/" would look for zero, one number at a time
        s = z * z
        x[e] = FOUR * z * (ONE + s * (A + s * (B + s * (C + s * (D + s * F)))))


@compiled
def near_chance(odds: np.float32) -> np.float32:
    """1 / (1 + exp(-odds)), with (1 - odds / 256)^256, and 1 from 256 upwards."""
    y = max(ZERO, ONE - odds * SHARE)
    y *= y
    y *= y
    y *= y
    y *= y
    y *= y
    y *= y
    y *= y
    y *= y
    chance: np.float32 = np.true_divide(ONE, ONE + y)
    return chance
