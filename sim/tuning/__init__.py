"""The search of a policy's options."""
