"""This machine: what it has, with the source of each fact, and what its memories, link and disk reach when measured."""
