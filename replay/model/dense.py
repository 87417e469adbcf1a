"""All that a model multiplies beside routed experts: norms, attention, shared experts, router, layers without experts.

What lies between two routers is one stretch, as in `sim.profiles.roofline`. A step as long as its context is a prefill,
causal among its tokens; any other attends to the whole cache. Latent attention (arXiv 2405.04434) is plain in a prefill
and absorbed otherwise. Left out: rotation and norms of queries and keys, biases, attention sinks (next to no time).
"""

import torch
from torch.nn import functional

from traces.models.profile import LayerKind, ModelProfile

Weights = tuple[torch.Tensor, torch.Tensor]  # (gate and up, or up: [n * I, H]; down: [H, I])


class Source:
    """Makes random tensors, and counts their parameters."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self.parameters = self.cached = 0
        self._rng = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def linear(self, inputs: int, outputs: int, scale: float | None = None) -> torch.Tensor:
        """Return a matrix [outputs, inputs]; scale: standard deviation."""
        self.parameters += inputs * outputs
        return self._normal((outputs, inputs), scale or inputs**-0.5)

    def norm(self, size: int) -> torch.Tensor:
        self.parameters += size
        return torch.ones(size, device=self.device, dtype=self.dtype)

    def matrices(self, experts: int, numbers: int) -> torch.Tensor:
        """Return so many random numbers for each of some experts, small enough that activations stay finite."""
        return self._normal((experts, numbers), 0.02)

    def cache(self, *shape: int) -> torch.Tensor:
        """Return keys and values of tokens that were never computed: random, so that no cache is ever zero."""
        made = self._normal(shape, 1.0)
        self.cached += made.numel()
        return made

    def _normal(self, shape: tuple[int, ...], scale: float) -> torch.Tensor:
        made = torch.empty(shape, device=self.device, dtype=self.dtype)
        return made.normal_(std=scale, generator=self._rng) if self._rng else made  # on meta it would take a second


class GroupedQueryAttention:
    """Heads share keys and values in groups; a token attends to at most `window` tokens, itself included (0: all)."""

    def __init__(
        self, profile: ModelProfile, source: Source, positions: int, window: int = 0, causal: bool = True
    ) -> None:
        self.heads, self.head_size = profile.heads, profile.head_size
        self.kv_heads = profile.kv_heads or profile.heads
        self.window, self.causal = window, causal
        self.queries, each = self.heads * self.head_size, self.kv_heads * self.head_size
        self.projection = source.linear(profile.hidden_size, self.queries + 2 * each)
        self.output = source.linear(self.queries, profile.hidden_size)
        # An encoder's tokens are all there at once.
        self.cache = source.cache(2, self.kv_heads, positions, self.head_size) if causal else None

    def add(self, residual: torch.Tensor, tokens: torch.Tensor, context: int) -> None:
        """Add the attention of tokens [n, H] to residual [n, H]."""
        n = len(tokens)
        mixed = functional.linear(tokens, self.projection)
        queries = by_head(mixed[:, : self.queries], self.heads)
        new = mixed[:, self.queries :].view(n, 2, self.kv_heads, self.head_size).permute(1, 2, 0, 3)
        if self.cache is not None:
            self.cache[:, :, context - n : context] = new
        if n < context:
            assert self.cache is not None
            seen = min(context, self.window + n - 1) if self.window else context
            attended = attention(queries, *self.cache[:, :, context - seen : context])
        elif 0 < self.window < n:
            attended = windowed_attention(queries, new[0], new[1], self.window)
        else:
            attended = attention(queries, new[0], new[1], causal=self.causal)
        residual.addmm_(by_token(attended), self.output.T)


class CrossAttention(GroupedQueryAttention):
    """Of a decoder's tokens to the encoder's states, whose keys and values are computed in the prefill."""

    def attend(self, residual: torch.Tensor, tokens: torch.Tensor, context: int, encoded: torch.Tensor | None) -> None:
        """Add the attention of tokens [n, H] to `context` states to residual; encoded: [context, H] in a prefill."""
        assert self.cache is not None
        if encoded is not None:
            mixed = functional.linear(encoded, self.projection[self.queries :])
            new = mixed.view(len(encoded), 2, self.kv_heads, self.head_size)
            self.cache[:, :, : len(encoded)] = new.permute(1, 2, 0, 3)
        queries = by_head(functional.linear(tokens, self.projection[: self.queries]), self.heads)
        residual.addmm_(by_token(attention(queries, *self.cache[:, :, :context])), self.output.T)


class LatentAttention:
    """MLA as in DeepSeek-V2: a token leaves one latent and one shared key part behind.

    Where the profile has a `query_latent_size`, queries pass a latent of their own; without, one projection makes them.
    """

    def __init__(self, profile: ModelProfile, source: Source, positions: int) -> None:
        H, self.heads, self.head_size = profile.hidden_size, profile.heads, profile.head_size
        self.shared, self.latent = profile.rope_head_size, profile.kv_latent_size
        query = self.head_size + self.shared
        cached, compressed = self.latent + self.shared, profile.query_latent_size
        self.parts = [compressed or self.heads * query, self.latent, self.shared]
        self.projection = source.linear(H, self.parts[0] + cached)
        self.query_norm = source.norm(compressed) if compressed else None
        queries = source.linear(compressed, self.heads * query) if compressed else self.projection[: self.parts[0]]
        self.query = queries
        self.query *= query**-0.5  # the scale of the scores
        self.norm = source.norm(self.latent)
        self.expand = source.linear(self.latent, self.heads * 2 * self.head_size)
        by_part = self.expand.view(self.heads, 2 * self.head_size, self.latent)
        self.keys, self.values = torch.split(by_part, self.head_size, dim=1)  # each [heads, head_size, latent]
        self.output = source.linear(self.heads * self.head_size, H)
        self.cache = source.cache(positions, cached)

    def add(self, residual: torch.Tensor, tokens: torch.Tensor, context: int) -> None:
        n = len(tokens)
        queries, latent, shared = torch.split(functional.linear(tokens, self.projection), self.parts, dim=-1)
        if self.query_norm is not None:
            queries = functional.linear(rms_norm(queries, self.query_norm), self.query)
        new = torch.cat([rms_norm(latent, self.norm), shared], dim=-1)
        self.cache[context - n : context] = new
        attend, keys = (self._plain, new) if n == context else (self._absorbed, self.cache[:context])
        residual.addmm_(by_token(attend(by_head(queries, self.heads), keys)), self.output.T)

    def _plain(self, queries: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
        """Attend with each head's keys and values; queries: [heads, n, head + shared], cached: [n, latent + shared]."""
        latent, shared = torch.split(cached, [self.latent, self.shared], dim=-1)
        expanded = by_head(functional.linear(latent, self.expand), self.heads)
        keys, values = torch.split(expanded, self.head_size, dim=-1)
        keys = torch.cat([keys, shared.expand(self.heads, -1, -1)], dim=-1)
        return attention(queries, keys, values, causal=True, scale=1.0)

    def _absorbed(self, queries: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
        """Attend to latents as the keys and values of all heads. cached: [context, latent + shared]."""
        own, shared = torch.split(queries, [self.head_size, self.shared], dim=-1)
        absorbed = torch.cat([own @ self.keys, shared], dim=-1)  # [heads, n, latent + shared]
        weights = torch.softmax(absorbed.flatten(0, 1) @ cached.T, dim=-1)
        attended = weights @ cached[:, : self.latent]
        return attended.view(self.heads, -1, self.latent) @ self.values.transpose(1, 2)


class OtherMixer:
    """What is neither of these: linear attention, Mamba, a convolution, attention to compressed or chosen tokens.

    It has as many weights, and a step reads as much of its cache and reads and writes its state.
    """

    def __init__(self, source: Source, hidden_size: int, kind: LayerKind, own: int, positions: int) -> None:
        inner = max(1, own // (2 * hidden_size))
        self.projection = source.linear(hidden_size, inner)
        self.output = source.linear(inner, hidden_size)
        self.each, self.window = kind.kv or kind.windowed, 0 if kind.kv else kind.window
        self.cache = source.cache(round(positions * self.each))
        self.state = source.cache(kind.state // source.dtype.itemsize)

    def add(self, residual: torch.Tensor, tokens: torch.Tensor, context: int) -> None:
        self.state.mul_(0.5)
        residual.addmm_(functional.linear(tokens, self.projection), self.output.T)
        seen = round(min(context, self.window or context) * self.each)
        residual[:, :1].add_(self.cache[:seen].sum(), alpha=1e-6)


def _is_plain(profile: ModelProfile, kind: LayerKind, own: int, causal: bool) -> bool:
    """Return whether a layer has grouped-query or latent attention of the profile's heads; own: its parameters."""
    H, size = profile.hidden_size, profile.head_size
    if latent := profile.kv_latent_size:
        query = profile.heads * (size + profile.rope_head_size)
        queries = profile.query_latent_size * (H + query) if profile.query_latent_size else H * query
        kept = latent + profile.rope_head_size
        parameters = queries + H * kept + latent * profile.heads * 2 * size + H * profile.heads * size
    else:
        groups = profile.kv_heads or profile.heads
        kept, parameters = 2 * groups * size, 2 * H * size * (profile.heads + groups)
    crossing = parameters if profile.encoder_layers and causal else 0
    stated = (kind.kv or kind.windowed) / (2 if crossing and kind.kv > kept else 1)
    return not kind.state and abs(own - parameters - crossing) <= 0.03 * own and (not causal or stated == kept)


class Layer:
    """A transformer layer but for its routed experts; where it has some, it has a router and perhaps shared ones."""

    def __init__(self, profile: ModelProfile, source: Source, positions: int, moe_layer: int, kind: LayerKind) -> None:
        H, encoder = profile.hidden_size, profile.encoder_moe_layers
        self.top_k = profile.top_k
        causal = moe_layer >= encoder
        self.attention: LatentAttention | GroupedQueryAttention | OtherMixer | None = None
        own = kind.parameters - kind.mlp - kind.shared - kind.routed * profile.experts * H
        if kind.mixes and not _is_plain(profile, kind, own, causal):
            self.attention = OtherMixer(source, H, kind, own, positions)
        elif kind.mixes and profile.kv_latent_size:
            self.attention = LatentAttention(profile, source, positions)
        elif kind.mixes:
            self.attention = GroupedQueryAttention(profile, source, positions, kind.window, causal)
        self.norms = [source.norm(H), source.norm(H)]
        self.cross = None
        if 0 < encoder <= moe_layer:
            self.cross = CrossAttention(profile, source, positions)
            self.cross_norm = source.norm(H)
        self.matrices = profile.expert_matrices
        size = (kind.shared + kind.mlp) // (self.matrices * H)
        self.feed_forward = feed_forward(source, H, size, self.matrices) if size else None
        self.router = source.linear(H, profile.experts) if kind.routed else None

    def __call__(
        self, residual: torch.Tensor, hidden: torch.Tensor, context: int, encoded: torch.Tensor | None
    ) -> None:
        """Add all but the routed experts to residual [n, H]; hidden [n, H] becomes their input."""
        if self.attention:
            self.attention.add(residual, rms_norm(residual, self.norms[0]), context)
        if self.cross:
            self.cross.attend(residual, rms_norm(residual, self.cross_norm), context, encoded)
        hidden.copy_(rms_norm(residual, self.norms[1]))
        if self.feed_forward:
            first, down = self.feed_forward
            residual.addmm_(activated(first, hidden, self.matrices), down.T)
        if self.router is not None:
            scores = torch.softmax(functional.linear(hidden, self.router), dim=-1)
            torch.topk(scores, self.top_k, sorted=False)


class Stack:
    """All layers of a model, its embedding and its vocabulary matmul. positions: the most tokens that a cache holds."""

    def __init__(self, profile: ModelProfile, source: Source, positions: int, max_tokens: int) -> None:
        H, self.encoder = profile.hidden_size, profile.encoder_moe_layers
        tied = not profile.embedding_parameters
        self.embedding = source.linear(H, profile.vocabulary, scale=None if tied else 1.0)
        self.stretches = [
            [Layer(profile, source, positions, moe_layer, kind) for kind in profile.stretch(moe_layer)]
            for moe_layer in range(profile.moe_layers + 1)  # the last stretch has no router
        ]
        self.norm = source.norm(H)
        self.vocabulary = self.embedding if tied else source.linear(H, profile.vocabulary)
        self.encoded = torch.zeros(max_tokens if self.encoder else 0, H, device=source.device, dtype=source.dtype)
        self.token = torch.zeros(max_tokens, dtype=torch.int64, device=source.device)
        self.token.copy_(torch.arange(max_tokens) % profile.vocabulary)

    def before_router(self, moe_layer: int, residual: torch.Tensor, hidden: torch.Tensor, context: int) -> None:
        """Compute from one MoE layer's combine to the next one's router; an encoder has no part in decoding."""
        n = len(residual)
        prefill = n == context
        if moe_layer < self.encoder and not prefill:
            return
        encoded = self.encoded[:n] if 0 < self.encoder <= moe_layer and prefill else None
        if encoded is not None and moe_layer == self.encoder:
            encoded.copy_(rms_norm(residual, self.norm))
        if moe_layer in (0, self.encoder):
            residual.copy_(functional.embedding(self.token[:n], self.embedding))
        for layer in self.stretches[moe_layer]:
            layer(residual, hidden, context, encoded)

    def head(self, residual: torch.Tensor, hidden: torch.Tensor) -> None:
        """Compute trailing layers among the step's own tokens, then the vocabulary: the greatest is the next token."""
        for layer in self.stretches[-1]:
            layer(residual, hidden, len(residual), self.encoded[: len(residual)] if self.encoder else None)
        logits = functional.linear(rms_norm(residual[-1:], self.norm), self.vocabulary)
        self.token[:1].copy_(logits.argmax(dim=-1))


def feed_forward(source: Source, hidden: int, intermediate: int, matrices: int) -> Weights:
    """Return the matrices of an MLP, as an expert has them."""
    return source.linear(hidden, (matrices - 1) * intermediate), source.linear(intermediate, hidden)


def activated(first: torch.Tensor, tokens: torch.Tensor, matrices: int) -> torch.Tensor:
    """Return what goes into an MLP's down projection, [n, I]; three matrices: silu(gate) * up, two: relu(up)."""
    inner = functional.linear(tokens, first)
    if matrices == 3:
        gate, up = inner.chunk(2, dim=-1)
        return functional.silu(gate) * up
    return functional.relu(inner)


def rms_norm(values: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    return functional.rms_norm(values, values.shape[-1:], weight, eps=1e-6)


def by_head(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Return [n, heads * d] as [heads, n, d], a view."""
    return values.view(len(values), heads, -1).transpose(0, 1)


def by_token(values: torch.Tensor) -> torch.Tensor:
    """Return [heads, n, d] as [n, heads * d]."""
    return values.transpose(0, 1).flatten(1)


def attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """Return [heads, n, d2] of queries [heads, n, d], keys [kv heads, m, d] and values [kv heads, m, d2]."""
    return functional.scaled_dot_product_attention(
        queries[None], keys[None], values[None], is_causal=causal, scale=scale, enable_gqa=len(keys) < len(queries)
    )[0]


def windowed_attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int) -> torch.Tensor:
    """Causal attention to at most `window` keys, the token's own included, in memory that grows with n alone.

    Blocks of `window` queries attend to the block before and their own, under a mask.
    """
    heads, n, _ = queries.shape
    blocks = -(-n // window)
    behind = blocks * window - n
    blocked = functional.pad(queries, (0, 0, 0, behind)).reshape(heads, blocks, window, -1).transpose(0, 1)

    def pairs(each: torch.Tensor) -> torch.Tensor:
        """Return [kv heads, n, d] as [blocks, heads, 2 * window, d]."""
        doubled = functional.pad(each, (0, 0, window, behind)).unfold(1, 2 * window, window)
        return doubled.permute(1, 0, 3, 2).repeat_interleave(heads // len(each), dim=1)

    query = torch.arange(window, device=queries.device)[:, None]
    key = torch.arange(2 * window, device=queries.device)
    seen = ((key > query) & (key <= query + window)).expand(blocks, 1, -1, -1).clone()
    seen[0] &= key >= window
    attended = functional.scaled_dot_product_attention(blocked, pairs(keys), pairs(values), attn_mask=seen)
    return attended.transpose(0, 1).flatten(1, 2)[:, :n]
