"""`eamc-blend`, our own policy, the evidence that it weighs, and the fit of its weights."""
