"""`eamc-blend`, our own policy, and the evidence that it weighs."""
