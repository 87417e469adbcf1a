"""How to observe the routing of a live transformers model."""
