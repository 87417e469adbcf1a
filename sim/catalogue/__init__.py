"""What is published of machines, each figure once and with its source: GPUs, CPUs, links, memories, whole machines."""
