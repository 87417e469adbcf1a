"""What this machine takes for each part of a step: measured, and written as a hardware profile."""
