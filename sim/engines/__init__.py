"""Who runs a run: SimPy, its compiled twin, the untimed counter, and the choice between them."""
