"""Parameters of the dense part: what `moe-sim` derives from a config, against what the real model has.

Takes the default configs of all MoE architectures of the installed transformers, builds each causal model without
memory for its weights, and counts the parameters outside its routed experts. Configs of which `moe-sim` makes no
profile, or transformers no causal model, are left out.
"""

import json
import tempfile
from importlib import import_module
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig

from sim.profiles.model_profile import ModelProfile, model
from tracer.architectures import architectures
from traces.errors import InputError

NEAR = 0.03
"""Of the real model's."""


def configs() -> dict[str, PretrainedConfig]:
    """Return the default config of each architecture, by its model type."""
    found = {}
    for each in (each.name for each in architectures() if not each.remote):
        module = import_module(f"transformers.models.{each}.configuration_{each}")
        for made in (value() for value in vars(module).values() if _is_config(value, module.__name__)):
            found[made.model_type] = made
    return found


def _is_config(value: object, module: str) -> bool:
    return isinstance(value, type) and issubclass(value, PretrainedConfig) and value.__module__ == module


def profile_of(config: PretrainedConfig) -> ModelProfile:
    """Raise InputError for one that no profile can be made of."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps({"torch_dtype": "bfloat16", **config.to_dict()}, default=str))
        return model(str(path))


def dense_parameters(config: PretrainedConfig) -> int:
    """Return those of the real model outside its routed experts; an embedding that is the head counts twice."""
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config)
    routed = {id(p) for m in made.modules() if type(m).__name__.endswith("Experts") for p in m.parameters()}
    dense = sum(p.numel() for p in made.parameters() if id(p) not in routed)
    head, embedding = made.get_output_embeddings(), made.get_input_embeddings()
    shared = isinstance(head, nn.Linear) and head.weight is embedding.weight
    return dense + (embedding.weight.numel() if shared else 0)


def main() -> None:
    """Print each ratio, and how many are near 1."""
    ratios, others = {}, 0
    for name, config in configs().items():
        try:
            profile = profile_of(config)
            ratios[name] = profile.dense_bytes / profile.dense_bytes_per_parameter / dense_parameters(config)
        except (InputError, ValueError, AttributeError, TypeError):  # the last three: of transformers
            others += 1
    for name, ratio in sorted(ratios.items(), key=lambda item: item[1]):
        print(f"{name:24} {ratio - 1:+.1%}")
    near = sum(abs(ratio - 1) <= NEAR for ratio in ratios.values())
    print(f"{near} of {len(ratios)} default configs of transformers {transformers.__version__} within {NEAR:.0%}")
    print(f"left out: {others} of which no profile or no causal model can be made, such as those of encoders of images")


if __name__ == "__main__":
    main()
