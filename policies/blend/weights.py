"""The weights of `eamc-blend`, as `python -m policies.blend.fit` prints them.

Places are the kinds of `policies.blend.evidence`, in their order, and a constant. Models, a row each: the log odds of
use in the next pass over those of an expert drawn evenly, with ids of tokens and without (CHANCE); of use in the layer
that is next in this pass (LAYER); of use in another layer of this pass, from ids (STEP); and the logarithm of the
passes until the next use of one that the next pass does not use (TIME).
"""

import numpy as np

CHANCE, CHANCE_BLIND, LAYER, LAYER_BLIND, STEP, TIME = range(6)

CONSTANT = 11

HORIZON = 64
"""Passes: a next use further away counts as this."""

WEIGHTS = np.array(
    [
        [0.14, -1.519, 0.109, 1.286, 0.448, -0.181, 0.57, 0.526, 0.0, 0.0, 0.0, 0.4],
        [-0.033, -1.437, 0.227, 1.844, 0.686, -0.155, 0.0, 0.0, 0.0, 0.0, 0.0, 0.131],
        [-0.492, -1.653, -0.006, 0.403, 0.148, -0.313, 0.206, 0.093, 1.997, 0.732, 0.39, 0.295],
        [-0.889, -1.451, 0.17, 0.794, 0.237, -0.247, 0.0, 0.0, 2.697, 0.0, 0.0, -0.197],
        [0.227, -1.688, 0.001, 1.046, 0.394, -0.27, 0.228, 0.092, 0.0, 1.048, 0.489, 0.548],
        [-0.184, 0.099, -0.193, -0.073, -0.082, 0.093, 0.0, 0.0, 0.0, 0.0, 0.0, 2.084],
    ]
)
"""[models, places]"""
