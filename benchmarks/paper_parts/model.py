"""A small transformer of 1.0 M parameters that predicts the next byte. Its results depend on its seed and its batches alone."""

import torch
from torch import nn

WIDTH, LAYERS, HEADS, LENGTH = 160, 3, 4, 32
_RATE = 1e-3


class ByteModel(nn.Module):
    """Causal transformer over bytes: tokens int64[batch, length] -> logits float32[batch, length, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.logits = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each token's successor."""
        hidden = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        logits: torch.Tensor = self.logits(self.layers(hidden, mask=self.mask, is_causal=True))
        return logits


def new_model(seed: int) -> tuple[ByteModel, torch.optim.AdamW]:
    """Return the model of a seed, and its optimizer. Each process computes with one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = ByteModel()
    return model, torch.optim.AdamW(model.parameters(), _RATE, fused=True)


def loss_of(model: ByteModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of predicting each byte from those before it in its row."""
    logits = model(tokens)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def validation_loss(model: ByteModel, rows: torch.Tensor) -> float:
    """Return the mean loss of all rows."""
    model.eval()
    with torch.no_grad():
        losses = [loss_of(model, part) for part in torch.split(rows, 64)]
    model.train()
    return float(torch.stack(losses).mean())
