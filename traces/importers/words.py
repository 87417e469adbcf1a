"""The words of dumps: which key or column is the request, the step, the token, the layer, the expert, the weight.

Names are looked up without case, underscores and dots. A format whose words mean something else is an entry of FORMATS;
a single dump's are stated with `--columns`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from traces.errors import unknown
from traces.steps import DECODE, PREFILL

ROLES = {
    "request": "request_id req_id request_ordinal request_idx request_index rid req request prompt_id prompt_idx "
    "prompt_index sequence_id seq_id seq_idx seq sequence conversation_id conversation session_id sample_id sample_idx "
    "sample example_id custom_id uid doc_id turn_id turn dialog_id problem_id question_id requests prompts sequences "
    "id",
    "step": "step step_id step_idx step_index forward_pass forward_pass_id pass pass_id iteration iter decode_step "
    "decode_idx ubatch ubatch_ordinal batch_id batch batch_idx gen_step call call_idx eval forward steps",
    "token": "token_idx token_index token_pos token_position position pos tok_idx tok token token_no token_number "
    "generated_token_index gen_pos logical_position seq_pos t row row_idx token_ordinal positions tokens",
    "token_id": "token_id generated_token_id input_id vocab_id tok_id token_ids input_ids tokid",
    "layer": "layer layer_id layer_idx layer_index layer_no layer_number layer_num moe_layer moe_layer_id "
    "moe_layer_idx layers router_layers moe_layers block block_id block_idx blk il lid l layer_name",
    "slot": "slot rank slot_id slot_idx k_idx topk_slot topk_rank topk_pos expert_rank expert_slot choice k",
    "expert": "topk_ids topk_experts topk_expert_ids topk_indices topk_idx top_k_ids top_k_experts top_k_indices "
    "selected_experts selected_expert_ids routed_experts expert_ids experts_ids expert_indices expert_idx "
    "expert_index expert_id experts expert selections selection chosen_experts chosen active_experts "
    "activated_experts routing routes route assignments indices ids eid e exp topk",
    "weight": "topk_weights topk_probs topk_scores top_k_weights top_k_probs selected_probabilities "
    "selected_weights routing_weights router_weights expert_weights gate_weights gating_weights weights weight "
    "probabilities probability probs prob router_probs gate_probs scores score gates gate p w router_logits "
    "gate_logits logits logit",
    "count": "count counts activation_counts activation_count activations freq frequency frequencies hits uses "
    "usage heat heatmap hotness logical_count token_count count_all_topk tokens_per_expert n",
    "share": "share shares fraction fractions proportion proportions percent percentage pct",
    "phase": "phase stage",
    "is_prefill": "is_prefill is_prompt is_context is_extend in_prompt prefill",
    "is_decode": "is_decode is_decoding is_generated is_generation is_output decode decoding generated",
    "forward_mode": "forward_mode",
    "hit": "hit is_hit was_hit cache_hit expert_hit residency resident is_resident was_resident cached is_cached "
    "was_cached in_cache from_cache",
    "miss": "miss is_miss was_miss cache_miss expert_miss",
}
"""The names of each role, the plainest first: where several are there whose values fit the role, the first counts."""

PHASE_ROLES = ("is_prefill", "is_decode", "forward_mode", "phase")
"""Roles of which each is the phase: by its name, as answers to a question, or by SGLang's numbers."""

HIT_ROLES = ("hit", "miss")
"""Whether the engine had an expert in its cache when a token chose it, as an answer to one question or the other."""

FACTS = {
    "experts": "num_experts n_experts n_expert experts_per_layer num_local_experts n_routed_experts expert_count",
    "top_k": "top_k topk n_expert_used experts_per_token num_experts_per_tok n_used assigned_experts_per_token",
    "layers": "num_layers n_layers n_layer layer_count moe_layers layers num_moe_layers",
    "tokens": "tokens num_tokens n_tokens token_count seq_len",
    "model": "model model_id model_name model_path",
}
"""Numbers and names that stand beside the routing."""

PHASES = {
    PREFILL: "0 prefill prompt p extend context input prompt_eval pp source decoder_prompt",
    DECODE: "1 decode decoding generate generated generation d output gen tg decoder_generated autoregressive",
}
"""What dumps call the phases."""

ANSWERS = {"1": True, "true": True, "t": True, "yes": True, "y": True, "hit": True}
ANSWERS |= {"0": False, "false": False, "f": False, "no": False, "n": False, "miss": False}
"""What cells of a column say that is a question, such as `is_prefill`."""

STACKS = {"encoder", "decoder"}
"""Stacks of layers that are numbered each from 0."""


@dataclass(frozen=True)
class Format:
    """A kind of dump whose words mean something else than in ROLES.

    has: names by which it is known. example: a file in tests/traces/formats, or in a public repository. columns: role
    -> name. phase: of all its tokens. note: what else is to know.
    """

    has: str
    example: str
    columns: Mapping[str, str] = field(default_factory=dict)
    phase: str | None = None
    note: str | None = None


FORMATS = {
    "TierInfer": Format("decode layer n_tokens n_used experts", "tierinfer.jsonl", {"step": "decode"}),
    "jlens, prompts": Format("prompt_id domain tokens layers", "crogers2287/jlens, reports/schema", phase="prefill"),
    "jlens, generated": Format(
        "generated_token_index router_layers", "crogers2287/jlens, reports/schema", phase="decode"
    ),
    "flash-moe profile": Format(
        "num_prompts capacity moe_layers layers",
        "mu-hashmi/flash-moe",
        note="activation_counts are the prompts in which an expert was used, not tokens",
    ),
}
"""What the table of words cannot know. Most dumps need no entry."""

KNOWN = ("vLLM", "SGLang", *FORMATS)
"""What is read by name: servers and recorders (`traces.importers.answers`, `recorder`), and FORMATS."""

SHORT = {"expert": {"", "e", "exp", "top", "sel", "slot", "k"}, "weight": {"wt", "g", "pr"}}
"""Names of columns with numbers, beside those of the roles."""

LIKE = (("weight", "weight|prob|gate|score"), ("expert", "expert|topk"), ("layer", "layer"))
"""A role, and parts of names that show it: for names that ROLES does not list and that hold no word of OTHER."""

OTHER = (
    "num number count bytes size hit hits load per used total text type entropy logit logits shape time ms us shared "
    "max min mean len length mass bias loss drift selected observed residency n universal unique capacity"
)
UNSURE = 999
"""The rank of such a name: behind those in ROLES."""


@lru_cache(8_192)
def _like(name: object) -> str | None:
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(name)).lower()
    if set(OTHER.split()) & set(re.findall(r"[a-z]+", text)) or re.search(r"[#\d]", text):
        return None
    return next((role for role, part in LIKE if re.search(part, text)), None)


@lru_cache(8_192)
def plain(name: object) -> str:
    return re.sub(r"[^a-z0-9]", "", str(name).lower())


def _by_name(table: Mapping[Any, str]) -> dict[str, tuple[int, Any]]:
    """Return the place of each plain name in its list, and whose it is."""
    rows = [(role, names.split()) for role, names in reversed(list(table.items()))]
    return {plain(name): (place, role) for role, names in rows for place, name in enumerate(names)}


_ROLE, _FACT, _PHASE = _by_name(ROLES), _by_name(FACTS), _by_name(PHASES)


@dataclass(frozen=True)
class Columns:
    """Finds the role of a name: `stated` ones (role -> name) go first, and their roles have no other name."""

    stated: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def parse(text: str | None) -> "Columns":
        """Read `layer=l,expert=e`. Raises InputError for an unknown role."""
        pairs = [part.partition("=")[::2] for part in filter(None, (text or "").split(","))]
        if odd := next((role for role, _ in pairs if role.strip() not in ROLES), None):
            raise unknown("column", odd, ROLES)
        return Columns({role.strip(): name.strip() for role, name in pairs})

    def role(self, name: object) -> str | None:
        stated = next((role for role, own in self.stated.items() if own == str(name)), None)
        found = _ROLE.get(plain(name), (UNSURE, _like(name)))[1]
        return stated or (None if found in self.stated else found)

    def pick(self, names: Iterable[Any]) -> dict[str, Any]:
        """Return the name of each role among these; of several the plainest."""
        ranked = [
            (-1 if str(name) in self.stated.values() else _ROLE.get(plain(name), (UNSURE,))[0], str(name), name)
            for name in names
            if self.role(name)
        ]
        return {str(self.role(name)): name for _, _, name in sorted(ranked, key=lambda one: one[:2], reverse=True)}

    def numbered(self, names: Iterable[object], role: str) -> list[str]:
        """Return the columns e0, e1, ... of a role in the order of their numbers; none where there are not two."""
        groups: dict[str, list[tuple[int, str]]] = {}
        for name in map(str, names):
            match = re.fullmatch(r"(.*?)[_.\- \[]*(\d+)\]?", name)
            if match and (self.role(match[1]) == role or plain(match[1]) in SHORT.get(role, ())):
                groups.setdefault(match[1], []).append((int(match[2]), name))
        found = max(groups.values(), key=len, default=[])
        return [name for _, name in sorted(found)] if len(found) > 1 else []


def fact(name: object) -> str | None:
    found = _FACT.get(plain(name))
    return None if found is None else str(found[1])


def format_of(names: Iterable[object]) -> tuple[str, Format] | None:
    """Return the format whose names are all there."""
    there = {plain(name) for name in names}
    return next((one for one in FORMATS.items() if {plain(n) for n in one[1].has.split()} <= there), None)


def answer_of(word: str) -> bool | None:
    """Return the answer that a cell gives to its column's question; of a number whether it is above 0."""
    text = word.strip().lower().removesuffix(".0")
    return int(text) > 0 if text.isdecimal() else ANSWERS.get(text)


def phase_of(word: str, role: str = "phase") -> int | None:
    """Return PREFILL or DECODE of a cell of a column of one of PHASE_ROLES; None if it is neither."""
    text = plain(word.removesuffix(".0")) if word[:1].isalnum() else ""
    if role == "forward_mode":
        return {"1": PREFILL, "2": DECODE}.get(text)
    if role != "phase" and text in ANSWERS:
        return DECODE if ANSWERS[text] == (role == "is_decode") else PREFILL
    found = _PHASE.get(text)
    return None if found is None else int(found[1])


LAYER = re.compile(r"(?:^|[^a-z0-9])(?:layers?|blk|block|l)[_.\- ]?(\d+)(?![0-9])", re.IGNORECASE)


def layer_number(text: object) -> int | None:
    """Return the layer in a name, such as `model.layers.3.mlp`, `blk.3` or `moe_layer3`; a number as it is."""
    found = layer_name(text)
    return None if found is None else found[1]


def layer_name(text: object) -> tuple[str, int] | None:
    """Return what stands before the layer in a name, and the layer; nothing before a number."""
    found = LAYER.search(str(text))
    if found:
        return str(text)[: found.start()], int(found[1])
    number = str(text).strip().removesuffix(".0")
    return ("", int(number)) if number.isdecimal() else None
