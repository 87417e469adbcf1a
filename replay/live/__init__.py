"""A model that generates now, its experts on disk or in host memory, with only a cache of them beside the compute."""
