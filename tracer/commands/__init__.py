"""The commands of `moe-trace`, a module for each kind; each imports heavy libraries only when it runs."""
