"""The commands of `moe-sim`, one file each."""
