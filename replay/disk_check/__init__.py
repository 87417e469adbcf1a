"""A check of the simulator against a disk and a CPU, and of policies against what people use on such machines."""
