"""Prompts are made with the model's tokenizer."""

from midfill.bench.peers.compared_model import ComparedModel, Prompts


def test_streams_read_different_code_and_longer_contexts_begin_with_shorter_ones(
    folder_model: ComparedModel,
) -> None:
    prompts = Prompts(folder_model, seed=0)
    first, second = (prompts.code_tokens(stream, 300, 500) for stream in (0, 1))
    assert len(first) == len(second) == 300
    assert first != second
    assert prompts.code_tokens(0, 400, 500)[:300] == first
    assert Prompts(folder_model, seed=0).code_tokens(0, 300, 500) == first


def test_random_tokens_are_ordinary_ones_and_never_the_same(folder_model: ComparedModel) -> None:
    prompts = Prompts(folder_model, seed=0)
    special = set(folder_model.checkpoint.tokenizer.special_tokens.values())
    tokens = prompts.random_tokens(2000)
    assert not special & set(tokens)
    assert prompts.random_tokens(2000) != tokens


def test_a_document_has_the_wanted_length_around_what_is_typed(folder_model: ComparedModel) -> None:
    prefix, typed, suffix = Prompts(folder_model, seed=0).document(400, 30)
    tokenizer = folder_model.checkpoint.tokenizer
    assert len(typed) == 30
    assert abs(len(tokenizer.encode(prefix)) - 200) <= 2
    assert abs(len(tokenizer.encode(suffix)) - 200) <= 2
