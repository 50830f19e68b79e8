"""Texts in, a byte-level BPE tokenizer out: always the same one, kept as a JSON file that its digest identifies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dlac_pipeline.lakehouse.durable_io import make_folder_durably, write_durably
from dlac_pipeline.lakehouse.errors import SpecInvalid

END_OF_DOCUMENT = "<|endofdocument|>"
_SMALLEST_VOCABULARY = 257
"""Every byte, and the end of a document."""


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Learn at most `vocab_size` tokens. The end of a document is token 0, and any text decodes back exactly.

    Raises:
        SpecInvalid: `vocab_size` leaves no room for the 256 bytes and the end of a document.
    """
    if vocab_size < _SMALLEST_VOCABULARY:
        raise SpecInvalid(f"expected a vocab_size of at least {_SMALLEST_VOCABULARY}, found {vocab_size!r}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _text_stays_text(tokenizer)


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Digest of the tokenizer's JSON, as it stands in the file."""
    return blake3(tokenizer.to_str(pretty=True).encode()).hexdigest()


def load_corpus_tokenizer(path: Path, digest: str | None) -> Tokenizer | None:
    """Return the tokenizer in the file, if the file exists and has this digest."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if blake3(content).hexdigest() != digest:
        return None
    return _text_stays_text(Tokenizer.from_str(content.decode()))


def save_tokenizer(tokenizer: Tokenizer, path: Path) -> None:
    """Write the tokenizer durably. A different file at `path` is never overwritten.

    Raises:
        SpecInvalid: `path` contains something else.
    """
    content = tokenizer.to_str(pretty=True).encode()
    if path.exists():
        if path.read_bytes() != content:
            raise SpecInvalid(
                f"expected tokenizer {tokenizer_digest(tokenizer)!r} or no file at {str(path)!r}, found another file: "
                "name another path, or move the file away if no table needs it"
            )
        return
    make_folder_durably(path.parent)
    write_durably(path, content)


def _text_stays_text(tokenizer: Tokenizer) -> Tokenizer:
    """A document that spells out the end-of-document token must not end there."""
    tokenizer.encode_special_tokens = True
    return tokenizer
