"""The demo's model: a small causal transformer over bytes."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """How large the model is.

    Args:
        width: numbers that stand for one byte inside the model.
        depth: attention blocks.
        heads: attention heads in a block; divides ``width``.
        context: bytes that the model sees at once.
    """

    width: int = 128
    depth: int = 4
    heads: int = 4
    context: int = 128


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer, each added to what came in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.queries_keys_values = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.attention_output = nn.Linear(shape.width, shape.width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(shape.width),
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """From ``[batch, context, width]`` to the same shape."""
        hidden = hidden + self.attend(self.attention_norm(hidden))
        fed_forward: Tensor = self.feed_forward(hidden)
        return hidden + fed_forward

    def attend(self, hidden: Tensor) -> Tensor:
        """Let every position look at itself and at those before it."""
        batch, length, width = hidden.shape
        split = self.queries_keys_values(hidden).view(batch, length, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4).unbind()
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        output: Tensor = self.attention_output(mixed.transpose(1, 2).reshape(batch, length, width))
        return output


class ByteTransformer(nn.Module):
    """Predicts each next byte of a text from those before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.depth)))
        self.norm = nn.LayerNorm(shape.width)
        self.apply(start_small)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of predicting ``targets`` from ``inputs``.

        Args:
            inputs: int64 bytes, shape ``[batch, context]``.
            targets: int64 bytes of the same shape, one place further in the text.

        Returns:
            A 0-dim tensor: cross-entropy in nats per byte.
        """
        hidden = self.bytes(inputs) + self.positions.weight[: inputs.shape[1]]
        hidden = self.norm(self.blocks(hidden))
        logits = functional.linear(hidden, self.bytes.weight)  # the embedding serves as the output layer too
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def start_small(module: nn.Module) -> None:
    """Draw weights so small that the untrained model takes all bytes for equally likely."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
