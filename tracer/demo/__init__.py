"""What `moe-trace record` uses when nothing is named: a small OLMoE (README.md) and prompts that ship with it."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
PROMPTS = Path(__file__).parent / "prompts.jsonl"
NAME = "demo-olmoe"
