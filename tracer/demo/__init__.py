"""What `moe-trace record` uses when nothing is named: a small model and prompts that ship with the project.

The model is a small OLMoE, trained on two cores (`train`): its routing is learned, what it says is not worth
reading. Its card is README.md.
"""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
PROMPTS = Path(__file__).parent / "prompts.jsonl"
NAME = "demo-olmoe"
