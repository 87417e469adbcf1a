"""Past activation matrices: the method of MoE-Infinity (`eamc`), its collection, and expert maps."""
