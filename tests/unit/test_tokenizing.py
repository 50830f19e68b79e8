import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from dlac_pipeline.extensions.sequences import tokenizing
from dlac_pipeline.extensions.sequences.documents import Encoding, documents_of
from dlac_pipeline.extensions.sequences.tokenizing import load_tokenizer
from dlac_pipeline.lakehouse.errors import TokenizerUnreadable
from dlac_pipeline.rows.transform import RowRejected
from examples.corpus.tokenizer import END_OF_DOCUMENT, save_tokenizer, tokenizer_digest, train_tokenizer

TEXTS = ["to be or not to be", "", "what is it", f"{END_OF_DOCUMENT} spelled out", "é ü 🙂"]
NOT_UTF8 = pa.Array.from_buffers(
    pa.large_string(), 3, [None, pa.py_buffer(np.array([0, 2, 4, 6], np.int64)), pa.py_buffer(b"ab\xff\xfecd")]
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tokenizer's JSON file."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    save_tokenizer(train_tokenizer(TEXTS, 300), path)
    return path


def reference(path: Path, text: str) -> list[int]:
    """Return the library's tokens of one text, without special tokens."""
    backend = Backend.from_file(str(path))
    backend.encode_special_tokens = True
    return list(backend.encode(text, add_special_tokens=False).ids)


@settings(max_examples=50, deadline=None)
@given(texts=st.lists(st.text(max_size=30), max_size=20), skip=st.integers(0, 3), large=st.booleans())
def test_texts_are_encoded_one_by_one(path: Path, texts: list[str], skip: int, large: bool) -> None:
    """The tokens of each text are the same for any type, offset and split of the array."""
    tokenizer = load_tokenizer(path)
    array = pa.array([*["x"] * skip, *texts], pa.large_string() if large else pa.string()).slice(skip)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tokenizing, "TEXT_BYTES_AT_ONCE", 16)
        values, offsets = tokenizer.encode(array)
    assert values.dtype == np.int32
    assert offsets.dtype == np.int64
    assert len(offsets) == len(texts) + 1
    for index, text in enumerate(texts):
        assert values[offsets[index] : offsets[index + 1]].tolist() == reference(path, text)


def test_special_token_text_stays_text(path: Path) -> None:
    """No document can contain the end token. A missing token is named. The digest equals the file's."""
    tokenizer = load_tokenizer(path)
    assert tokenizer.token_id(END_OF_DOCUMENT) not in tokenizer.encode(pa.array([TEXTS[3]]))[0]
    assert tokenizer.digest == blake3(path.read_bytes()).hexdigest() == tokenizer_digest(Backend.from_file(str(path)))
    with pytest.raises(TokenizerUnreadable, match="expected a token '<bos>'"):
        tokenizer.token_id("<bos>")


def test_no_token_is_lost_or_added(tmp_path: Path, path: Path) -> None:
    """A file's settings for truncation and padding would lose tokens or add some."""
    backend = Backend.from_file(str(path))
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    frame = (END_OF_DOCUMENT, backend.token_to_id(END_OF_DOCUMENT))
    backend.post_processor = processors.TemplateProcessing(single=f"{frame[0]} $A", special_tokens=[frame])
    backend.save(str(tmp_path / "cutting.json"))
    values, offsets = load_tokenizer(tmp_path / "cutting.json").encode(pa.array(TEXTS[:1]))
    assert values.tolist() == reference(path, TEXTS[0])
    assert offsets.tolist() == [0, len(values)]


def test_fast_tokenizer_is_used(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Its backend encodes, and the wrapper keeps its truncation."""
    backend = Backend.from_file(str(path))
    backend.enable_truncation(2)
    wrapped = SimpleNamespace(from_pretrained=lambda name: SimpleNamespace(backend_tokenizer=backend))
    monkeypatch.setitem(sys.modules, "transformers", cast(Any, SimpleNamespace(AutoTokenizer=wrapped)))
    tokenizer = load_tokenizer("some/model")
    assert tokenizer.encode(pa.array(TEXTS[:1]))[0].tolist() == reference(path, TEXTS[0])
    assert backend.truncation is not None
    assert tokenizer.digest == load_tokenizer("some/model").digest


def test_texts_become_documents(path: Path) -> None:
    """A text is a document that ends with its token. An empty text is filtered."""
    tokenizer = load_tokenizer(path)
    live = pa.table({"text": pa.chunked_array([TEXTS[:2], TEXTS[2:]])})
    documents = documents_of(live, 2 * np.arange(5), column="text", encoding=Encoding(tokenizer=tokenizer, end_id=0))
    expected = [[*reference(path, text), 0] for text in TEXTS if text]
    assert documents.values.tolist() == [token for tokens in expected for token in tokens]
    assert documents.rows.filtered.tolist() == [2]
    assert documents.rows.positions.tolist() == [0, 4, 6, 8]
    assert documents.rows.ends.tolist() == documents.ends.tolist() == np.cumsum([len(t) for t in expected]).tolist()


def test_invalid_text_is_rejected_row(path: Path) -> None:
    """Bytes that are not UTF-8 fail with the row's position, or are quarantined."""
    live, tokenizer = pa.table({"text": NOT_UTF8}), load_tokenizer(path)
    with pytest.raises(RowRejected, match="UnicodeDecodeError") as caught:
        documents_of(live, np.array([1, 5, 8]), column="text", encoding=Encoding(tokenizer=tokenizer))
    assert caught.value.position == 5
    documents = documents_of(
        live, np.array([1, 5, 8]), column="text", encoding=Encoding(tokenizer=tokenizer), reject="quarantine"
    )
    assert documents.values.tolist() == [*reference(path, "ab"), *reference(path, "cd")]
    assert [position for position, _ in documents.rows.quarantined] == [5]
    assert documents.rows.positions.tolist() == [1, 8]
