"""Prompts: random tokens, real code and documents, made with a model's tokenizer."""

import pytest
from tiny_gguf import write_gguf

from midfill.lab.bench.prompts import Prompts
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.tokens.tokenizer import Tokenizer


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
