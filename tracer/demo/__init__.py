"""What `moe-trace record` uses when nothing is named: a small model and prompts that ship with the project.

The model is an OLMoE with random weights, a stand-in: its routing is real, what it says means nothing.
"""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
PROMPTS = Path(__file__).parent / "prompts.jsonl"
NAME = "demo-olmoe-random"
