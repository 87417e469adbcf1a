"""`make gpu-check`: everything that only a GPU can show, in one file."""
