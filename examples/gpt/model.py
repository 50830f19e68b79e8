"""A small GPT in plain PyTorch: token ids in, one loss per sample out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True, slots=True)
class GptConfig:
    """The size of the model."""

    vocab_size: int = 1024
    """Tokens that it can read and predict."""
    sequence_length: int = 128
    """Tokens of the longest sequence."""
    d_model: int = 32
    """Features per token."""
    layers: int = 1
    """Transformer blocks."""
    heads: int = 2
    """Attention heads; divides d_model."""
    dropout: float = 0.0
    """Part of the features that training drops at random."""

    @classmethod
    def from_params(cls, params: Mapping[str, str]) -> GptConfig:
        """The configuration in a job spec's `params`; what is not named there keeps its default."""
        sizes = ("vocab_size", "sequence_length", "d_model", "layers", "heads")
        return cls(
            **{name: int(params[name]) for name in sizes if name in params},
            dropout=float(params.get("dropout", "0.0")),
        )


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each added to its input."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.query_key_value = nn.Linear(config.d_model, 3 * config.d_model)
        self.attention_out = nn.Linear(config.d_model, config.d_model)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(config.d_model),
            nn.Linear(config.d_model, 4 * config.d_model),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * config.d_model, config.d_model),
            nn.Dropout(config.dropout),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Features [samples, T, d_model] to features of the same shape."""
        features = features + self.attention(self.attention_norm(features))
        mixed: Tensor = features + self.feed_forward(features)
        return mixed

    def attention(self, features: Tensor) -> Tensor:
        """Every token looks at itself and the tokens before it."""
        samples, length, d_model = features.shape
        split = self.query_key_value(features).view(samples, length, 3, self.heads, d_model // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(samples, length, d_model))
        return out


class Gpt(nn.Module):
    """Predicts every token of a sequence from those before it."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.d_model)
        self.position = nn.Embedding(config.sequence_length, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.d_model)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Ids [samples, T] to the mean cross-entropy of each sample [samples], in nats per token."""
        known, wanted = tokens[:, :-1], tokens[:, 1:].long()
        features = self.dropout(self.token(known) + self.position.weight[: known.shape[1]])
        features = self.norm(self.blocks(features))
        logits = functional.linear(features, self.token.weight)  # the embedding, read backwards, is the output layer
        loss = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
        return torch.mean(loss.view(wanted.shape), dim=1)
