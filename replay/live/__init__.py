"""A model that generates now, with its experts on disk, or in host memory, and only a cache of them beside the compute.

`replay.load_model` gives a transformers model that is called as any other. Its experts go the way of a
replay: the same session, policies, pump and lanes."""
