"""An EAGLE-3 head (Li et al., "EAGLE-3", 2025) in plain torch, and its training.

The head is one decoder layer. It reads the streams of three of the target's layers, and behind its first draft its own
output in their place. Trained on the target's streams alone it would meet its own output for the first time when it is
used, so training goes the same way for several steps ("training-time test").
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from engine_drafters.train.target import Batch, Target

STEPS = 3
"""The first drafts are trained; a fourth has much the same input as the third."""
DRAFTS = 4
"""So many are measured."""
STEP_WEIGHT = 0.8
"""A later step counts so much of the one before it, as its draft is only looked at where that one was right."""


class RMSNorm(nn.Module):
    """In float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self._eps)


class Attention(nn.Module):
    """Over the embedding and the feature side by side. Names as in the published layout."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)


class MLP(nn.Module):
    """Gated by SiLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MidLayer(nn.Module):
    """The decoder layer. Its residual is the feature, not normed; the token enters by attention alone."""

    frequencies: torch.Tensor

    def __init__(self, config: dict[str, int | float]) -> None:
        super().__init__()
        hidden, eps = int(config["hidden_size"]), float(config["rms_norm_eps"])
        self.head_dim = int(config["head_dim"])
        self.hidden_norm = RMSNorm(hidden, eps)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(
            hidden, int(config["num_attention_heads"]), int(config["num_key_value_heads"]), self.head_dim
        )
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(hidden, int(config["intermediate_size"]))
        frequencies = float(config["rope_theta"]) ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def both(self, embedded: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
        """What attention reads: [..., 2H]."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(feature)], dim=-1)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [..., n, heads, D] at positions [..., n]."""
        angles = positions[..., None, None] * self.frequencies
        first, second = x.float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def keys(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all query heads: [..., n, heads, D] each."""
        k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.self_attn.k_proj, self.self_attn.v_proj))
        groups = self.self_attn.q_proj.out_features // self.self_attn.k_proj.out_features
        return self.rotate(k, positions).repeat_interleave(groups, -2), v.repeat_interleave(groups, -2)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[..., n, heads, D], scaled."""
        q = self.self_attn.q_proj(x).unflatten(-1, (-1, self.head_dim))
        return self.rotate(q, positions) * self.head_dim**-0.5

    def after(self, feature: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output [N, H], from its feature [N, H] and what its heads gathered [N, heads, D]."""
        hidden = feature + self.self_attn.o_proj(attended.flatten(1))
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Head(nn.Module):
    """The head's tensors, by the names of SafeAILab's layout, and its forward pass over whole texts."""

    embedding: torch.Tensor
    to_target: torch.Tensor

    def __init__(self, config: dict[str, int | float], embedding: torch.Tensor, to_target: torch.Tensor) -> None:
        """config: of the head's config.json; embedding: the target's [V, H]; to_target: int64 [draft_vocab_size], the
        target's tokens that the head has rows for, ascending."""
        super().__init__()
        hidden = int(config["hidden_size"])
        self.fc = nn.Linear(3 * int(config["target_hidden_size"]), hidden, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(hidden, float(config["rms_norm_eps"]))
        self.lm_head = nn.Linear(hidden, len(to_target), bias=False)
        has_row = torch.zeros(len(embedding), dtype=torch.bool)
        has_row[to_target] = True
        self.register_buffer("d2t", to_target - torch.arange(len(to_target)))
        self.register_buffer("t2d", has_row)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("to_target", to_target, persistent=False)

    def logits(self, batch: Batch, streams: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """The draft logits at the roots that have a draft so many steps on: for each step, [n, draft_vocab_size].

        streams: [B, T, 3H]. Each step's token is the text's, so a step is what it would be if all drafts before it
        were right; where one is not, nobody looks at those behind it.
        """
        layer = self.midlayer
        num_texts, num_tokens = batch.tokens.shape
        positions = torch.arange(num_tokens)
        features = self.fc(streams)
        following = F.pad(batch.tokens[:, 1:], (0, 1))
        read = layer.both(F.embedding(following, self.embedding), features)
        keys, values = (t.transpose(1, 2) for t in layer.keys(read, positions))
        at, num_places = (batch.row, batch.place), int(batch.place.max()) + 1

        def spread(x: torch.Tensor) -> torch.Tensor:
            """Of each root, [N, heads, ...] -> by text, [B, heads, R, ...]."""
            return x.new_zeros(num_texts, num_places, *x.shape[1:]).index_put(at, x).transpose(1, 2)

        ahead = positions > spread(batch.root[:, None])[..., None]
        feature, query = batch.behind(features), batch.behind(read)
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        made = []
        for step in range(steps):
            if step:
                query = layer.both(F.embedding(batch.behind(batch.tokens, 1 + step), self.embedding), feature)
                own.append(layer.keys(query, batch.root + step))
            q = layer.queries(query, batch.root + step)
            scores = (spread(q) @ keys.transpose(-1, -2)).masked_fill(ahead, float("-inf"))
            beside = [spread((q * k).sum(-1))[..., None] for k, _ in own]
            shares = torch.cat([scores, *beside], dim=-1).softmax(-1)
            attended = (shares[..., :num_tokens] @ values).transpose(1, 2)[at]
            for number, (_, v) in enumerate(own, num_tokens):
                attended = attended + shares[..., number].transpose(1, 2)[at][..., None] * v
            feature = layer.after(feature, attended)
            made.append(self.lm_head(self.norm(feature[batch.drafted > step])))
        return made


class Eagle3:
    """Trains an `Eagle3Head` to say what the target says.

    A target's streams may be a hundred times larger than what one layer adds to them. The feature made of them is the
    head's residual, so its layer would not be heard: the head is trained on streams scaled to about one, and the scale
    is put into fc when the head is done.
    """

    def __init__(self, target: Target, head: Eagle3Head, layers: tuple[int, ...], example: Batch) -> None:
        """layers: behind which the head reads the streams; example: texts whose streams are measured."""
        self.module = head
        self._target = target
        self._layers = layers
        streams, _ = target.states(example.tokens)
        self._scales = [float(example.behind(streams[at]).square().mean(-1).sqrt().median()) for at in layers]
        with torch.no_grad():  # the same words as the target, to begin with
            head.norm.weight.copy_(target.model.model.norm.weight)
            head.lm_head.weight.copy_(target.head[head.to_target])

    def tensors(self) -> dict[str, torch.Tensor]:
        """The head's, for streams as they are."""
        made = dict(self.module.state_dict())
        parts = made["fc.weight"].chunk(len(self._layers), dim=1)
        made["fc.weight"] = torch.cat([p / scale for p, scale in zip(parts, self._scales, strict=True)], dim=1)
        return made

    def loss(self, batch: Batch) -> torch.Tensor:
        """Cross entropy against the target's distribution over the head's tokens."""
        made, hidden = self._drafts(batch, STEPS)
        says = self._target.says(batch, hidden, self.module.to_target)
        total = torch.zeros(())
        for step, logits in enumerate(made):
            wanted = says[torch.arange(len(says))[batch.drafted > step] + step]
            total = total + STEP_WEIGHT**step * F.cross_entropy(logits, wanted)
        return total / sum(STEP_WEIGHT**step for step in range(STEPS))

    def tokens(self, batch: Batch) -> list[torch.Tensor]:
        """The likeliest draft of each step where there is one, the target's ids: [n] each."""
        return [self.module.to_target[logits.argmax(-1)] for logits in self._drafts(batch, DRAFTS)[0]]

    def _drafts(self, batch: Batch, steps: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The logits of each step over the head's own tokens, and the target's final states [B, T, H]."""
        streams, hidden = self._target.states(batch.tokens)
        chosen = [streams[layer] / scale for layer, scale in zip(self._layers, self._scales, strict=True)]
        return self.module.logits(batch, torch.cat(chosen, dim=-1), steps), hidden
