"""The weights of `eamc-blend`, as `python -m policies.blend.fit` prints them.

Places are the kinds of `policies.blend.evidence`, in their order, and a constant. Models, a row each: the log odds of
use in the next pass over those of an expert drawn evenly, with ids of tokens and without (CHANCE); of use in the layer
that is next in this pass (LAYER); of use in another layer of this pass, from ids (STEP); and the logarithm of the
passes until the next use of one that the next pass does not use (TIME).
"""

import numpy as np

CHANCE, CHANCE_BLIND, LAYER, LAYER_BLIND, STEP, TIME = range(6)

CONSTANT = 11

WEIGHTS = np.array(
    [
        [0.371, -1.86, 0.117, 1.578, 0.5, -0.155, 0.57, 0.547, 0.0, 0.0, 0.0, 0.127],
        [0.214, -1.986, 0.263, 2.265, 0.859, -0.126, 0.0, 0.0, 0.0, 0.0, 0.0, -0.268],
        [-0.329, -2.227, -0.007, 0.512, 0.192, -0.291, 0.189, 0.097, 2.405, 0.747, 0.401, 0.042],
        [-0.779, -2.275, 0.209, 1.011, 0.403, -0.233, 0.0, 0.0, 3.185, 0.0, 0.0, -0.576],
        [0.485, -1.989, -0.014, 1.275, 0.411, -0.238, 0.21, 0.095, 0.0, 1.084, 0.51, 0.33],
        [-0.287, 0.098, -0.279, -0.133, -0.193, 0.095, 0.0, 0.0, 0.0, 0.0, 0.0, 2.229],
    ]
)
"""[models, places]"""
