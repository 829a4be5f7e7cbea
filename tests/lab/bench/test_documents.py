"""Text to measure with: real files, the same for a seed, and unseen where that matters."""

from importlib.util import find_spec

import pytest
from tiny_gguf import write_gguf

from midfill.errors import MidfillError
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.tokens.tokenizer import Tokenizer
from midfill_lab.bench.documents import (
    Prompts,
    standard_library_documents,
    unseen_documents,
)


def test_documents_are_real_files_of_the_wanted_size_and_the_same_for_a_seed() -> None:
    documents = standard_library_documents(4, seed=3)
    assert all(6000 <= len(text) <= 9000 for text in documents)
    assert len(set(documents)) == 4
    assert documents == standard_library_documents(4, seed=3)
    with pytest.raises(ValueError, match="only"):
        standard_library_documents(10**6)


def test_unseen_documents_say_where_they_come_from() -> None:
    chosen = unseen_documents(5, seed=1)
    assert chosen == unseen_documents(5, seed=1)
    assert all(6000 <= len(text) <= 9000 for text in chosen.texts)
    assert "numpy" in chosen.source
    assert ("torch" in chosen.source) == (find_spec("torch") is not None)
    with pytest.raises(MidfillError, match="wanted files are in numba"):
        unseen_documents(10**6)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_checkpoint(write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")).tokenizer


def test_streams_read_different_code_and_longer_contexts_begin_with_shorter_ones(
    tokenizer: Tokenizer,
) -> None:
    prompts = Prompts(tokenizer, seed=0)
    first, second = (prompts.code_tokens(stream, 300, 500) for stream in (0, 1))
    assert len(first) == len(second) == 300
    assert first != second
    assert prompts.code_tokens(0, 400, 500)[:300] == first
    assert Prompts(tokenizer, seed=0).code_tokens(0, 300, 500) == first


def test_random_tokens_are_ordinary_ones_and_never_the_same(tokenizer: Tokenizer) -> None:
    prompts = Prompts(tokenizer, seed=0)
    special = set(tokenizer.special_tokens.values())
    tokens = prompts.random_tokens(2000)
    assert not special & set(tokens)
    assert prompts.random_tokens(2000) != tokens


def test_a_document_has_the_wanted_length_around_what_is_typed(tokenizer: Tokenizer) -> None:
    prefix, typed, suffix = Prompts(tokenizer, seed=0).document(400, 30)
    assert len(typed) == 30
    assert abs(len(tokenizer.encode(prefix)) - 200) <= 2
    assert abs(len(tokenizer.encode(suffix)) - 200) <= 2
