"""Sizes and durations of each part: for an accelerator, for the CPU, and for a quick check."""

from dataclasses import dataclass, replace

from benchmarks.recovery_lab.memory_run import SIZES, Size


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """A GPT and its batches."""

    vocab_size: int
    d_model: int
    layers: int
    heads: int
    length: int
    """Tokens of a sequence."""
    batch: int
    """Sequences of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of all parts."""

    corpus: str
    """Folder of the standard library with the demo's training data, or empty for all of it."""
    demo_batch: int
    demo_every_steps: int
    model: ModelSize
    segment_s: float
    """Seconds of one measured segment of steps."""
    pairs: int
    training: dict[str, str]
    """Params of the training with and without checkpoints."""
    block_s: float
    block_pairs: int
    memory: dict[str, Size]
    """Trainings that keep states in memory."""
    memory_kills: int
    mesh: dict[str, str]
    """Params of the GPT on a mesh."""


_SMALL = ModelSize(vocab_size=1024, d_model=64, layers=2, heads=4, length=129, batch=16)
ACCELERATOR = Sizes(
    corpus="",
    demo_batch=512,
    demo_every_steps=25,
    model=ModelSize(vocab_size=8192, d_model=768, layers=10, heads=12, length=513, batch=32),
    segment_s=5.0,
    pairs=10,
    training={"width": "768", "layers": "10", "vocabulary": "18432", "tokens": "256"},
    block_s=15.0,
    block_pairs=11,
    memory={
        "100M": replace(SIZES["100M"], batch=2048, calm_steps=600),
        "400M": replace(SIZES["400M"], batch=1024, sharded=False),
    },
    memory_kills=4,
    mesh={"layers": "8", "width": "1024", "vocabulary": "8192"},
)
CPU = Sizes(
    corpus="asyncio",
    demo_batch=128,
    demo_every_steps=5,
    model=_SMALL,
    segment_s=3.0,
    pairs=10,
    training={"width": "384", "layers": "4", "vocabulary": "4096", "tokens": "32"},
    block_s=5.0,
    block_pairs=11,
    memory={"1.1M": SIZES["1.1M"]},
    memory_kills=6,
    mesh={"layers": "2", "width": "64", "vocabulary": "512"},
)
QUICK = Sizes(
    corpus="asyncio",
    demo_batch=64,
    demo_every_steps=5,
    model=_SMALL,
    segment_s=0.4,
    pairs=3,
    training={"width": "96", "layers": "1", "vocabulary": "512", "tokens": "16"},
    block_s=0.5,
    block_pairs=3,
    memory={"1.1M": SIZES["1.1M"]},
    memory_kills=2,
    mesh={"layers": "2", "width": "32", "vocabulary": "64"},
)


def sizes_for(*, accelerated: bool, quick: bool) -> Sizes:
    """Return the sizes for a node."""
    if quick:
        return QUICK
    return ACCELERATOR if accelerated else CPU
