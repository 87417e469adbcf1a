"""Checks that need a machine: prediction against measurement on a GPU, on a disk and of live generation.

`make gpu-check`, `make disk-check`, `make live-check`: one runner (`runner`) takes lists of cells (`cells`).
"""
