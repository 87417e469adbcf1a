"""A checkpoint's own code, as Arctic's and deepseek-moe-16b's: experts are modules in a list, called one by one.

The test copies this file beside a checkpoint, where transformers loads it from. Tokens do not look at each other.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class ListedConfig(PretrainedConfig):
    model_type = "listed_moe"

    def __init__(self, vocab_size: int = 257, hidden_size: int = 16, num_experts: int = 6, top_k: int = 2, **rest: Any):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_experts, self.num_experts_per_tok = num_experts, top_k
        self.num_hidden_layers = 2
        super().__init__(**rest)


class Block(nn.Module):
    def __init__(self, config: ListedConfig, sort: bool):
        super().__init__()
        self.top_k, self.sort = config.num_experts_per_tok, sort
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Linear(config.hidden_size, config.hidden_size) for _ in range(config.num_experts)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        states = hidden.flatten(0, 1)
        weights, index = self.gate(states).softmax(-1).topk(self.top_k, dim=-1)
        out = torch.zeros_like(states)
        for number, expert in enumerate(self.experts):
            rows, slots = (index == number).nonzero(as_tuple=True)
            if self.sort:  # as deepseek-moe-16b at inference: in another order than the tokens', idle experts left out
                rows, slots = rows.flip(0), slots.flip(0)
                if not len(rows):
                    continue
            out.index_add_(0, rows, expert(states[rows]) * weights[rows, slots, None])
        return out.view_as(hidden)


class ListedForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = ListedConfig

    def __init__(self, config: ListedConfig):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, sort) for sort in (False, True))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(
        self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = False, **_: Any
    ) -> CausalLMOutputWithPast:
        hidden = self.embed(input_ids)
        if use_cache:
            past_key_values = past_key_values or DynamicCache()
            past_key_values.update(hidden[:, None], hidden[:, None], 0)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        found: dict[str, Any] = {"logits": self.head(hidden), "past_key_values": past_key_values}
        return CausalLMOutputWithPast(**found)
