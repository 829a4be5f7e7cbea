"""Each family's sentinels are found by vocabulary, and a checkpoint's own metadata wins."""

import pytest

from midfill.errors import InvalidRequestError
from midfill.infill.formats import FAMILIES, Sentinel, custom_format, find_format


def vocabulary(*texts: str) -> dict[str, int]:
    return {text: 100 + number for number, text in enumerate(texts)}


STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<|endoftext|>")
QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")


@pytest.mark.parametrize("entry", FAMILIES, ids=lambda entry: entry.name)
def test_every_family_is_found_from_its_own_tokens(entry) -> None:
    texts = [entry.prefix, entry.suffix, entry.middle, *entry.stop]
    texts += [entry.repository, entry.file_separator]
    special = vocabulary(*dict.fromkeys(text for text in texts if text))
    family = entry.models[0] if entry.models else ""
    found = find_format(family, special, {"general.name": "".join(entry.named)})
    assert found is not None
    assert found.name == entry.name
    assert found.order == entry.order
    assert found.prefix == Sentinel(entry.prefix, special[entry.prefix])
    assert (found.middle is None) == (entry.middle is None)
    assert special[entry.prefix] in found.stop_token_ids
    assert len(set(found.stop_token_ids)) == len(found.stop_token_ids)


def test_a_vocabulary_without_sentinels_has_no_format() -> None:
    assert find_format("llama", vocabulary("<|endoftext|>", "<filename>"), {}) is None


@pytest.mark.parametrize(
    ("extra", "family", "name"),
    [
        (("<repo_name>", "<file_sep>"), "starcoder2", "starcoder2"),
        (("<reponame>", "<filename>", "<gh_stars>"), "granite", "starcoder"),
        (("<reponame>", "<filename>"), "starcoder2", "starcoder"),  # tokens outweigh the name
    ],
)
def test_families_spelled_alike_are_told_apart_by_their_other_tokens(extra, family, name) -> None:
    found = find_format(family, vocabulary(*STARCODER, *extra), {})
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    ("model", "name", "order"),
    [
        ("Mellum-4b-base", "mellum", "spm"),
        ("mellum-4b-sft-python.Q8_0", "mellum", "spm"),
        ("refact", "starcoder", "psm"),
        (None, "starcoder", "psm"),
    ],
)
def test_an_order_that_no_token_tells_is_told_by_the_models_name(model, name, order) -> None:
    special = vocabulary(*STARCODER, "<reponame>", "<filename>")
    found = find_format("llama", special, {} if model is None else {"general.name": model})
    assert found is not None
    assert (found.name, found.order) == (name, order)


def test_qwen_and_codegemma_differ_in_their_file_separator() -> None:
    qwen = find_format("qwen2", vocabulary(*QWEN, "<|file_sep|>", "<|repo_name|>"), {})
    gemma = find_format("gemma", vocabulary(*QWEN[:3], "<|file_separator|>", "<eos>"), {})
    assert qwen is not None
    assert gemma is not None
    assert qwen.file_separator == Sentinel("<|file_sep|>", 104)
    assert gemma.file_separator == Sentinel("<|file_separator|>", 103)


def test_gguf_metadata_wins_over_the_vocabulary() -> None:
    special = vocabulary(*QWEN, "<a>", "<b>", "<c>")
    metadata = {
        "tokenizer.ggml.fim_pre_token_id": special["<a>"],
        "tokenizer.ggml.fim_suf_token_id": special["<b>"],
        "tokenizer.ggml.fim_mid_token_id": special["<c>"],
        "tokenizer.ggml.eot_token_id": 7,
    }
    found = find_format("qwen2", special, metadata)
    assert found is not None
    assert found.name == "metadata"
    assert [found.prefix.text, found.suffix.text] == ["<a>", "<b>"]
    assert found.middle == Sentinel("<c>", special["<c>"])
    assert 7 in found.stop_token_ids


def test_several_stop_tokens_may_be_a_list() -> None:
    special = vocabulary(*QWEN, "<end>", "<gap>")
    metadata = {
        "tokenizer.ggml.fim_pre_token_id": 103,
        "tokenizer.ggml.fim_suf_token_id": 101,
        "tokenizer.ggml.fim_mid_token_id": 102,
        "tokenizer.ggml.eot_token_id": 7,
        "eot_token": ["<end>", "<gap>", "<no such token>"],
    }
    found = find_format("qwen2", special, metadata)
    assert found is not None
    assert found.stop_token_ids == (103, 101, 102, 7, special["<end>"], special["<gap>"])


def test_metadata_that_agrees_with_a_known_family_keeps_its_order_and_separators() -> None:
    special = vocabulary("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>")
    metadata = {
        "tokenizer.ggml.fim_pre_token_id": 100,
        "tokenizer.ggml.fim_suf_token_id": 101,
        "tokenizer.ggml.fim_mid_token_id": 102,
    }
    found = find_format("llama", special, metadata)
    assert found is not None
    assert (found.name, found.order) == ("seed-coder", "spm")


@pytest.mark.parametrize("spelling", ["▁<PRE>", {"content": "▁<PRE>", "lstrip": False}])
def test_old_gguf_keys_and_tokenizer_config_fields_are_read(spelling) -> None:
    special = vocabulary("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    old = {
        "tokenizer.ggml.prefix_token_id": 100,
        "tokenizer.ggml.suffix_token_id": 101,
        "tokenizer.ggml.middle_token_id": 102,
    }
    config = {"prefix_token": spelling, "suffix_token": "▁<SUF>", "middle_token": "▁<MID>"}
    from_ids = find_format("llama", special, old)
    from_texts = find_format("llama", special, config)
    assert from_ids == from_texts
    assert from_ids is not None
    assert from_ids.name == "codellama"
    assert special["▁<EOT>"] in from_ids.stop_token_ids


@pytest.mark.parametrize("nonsense", [2**32 - 1, -1, True, None, "no such token", 1.5])
def test_unusable_metadata_is_ignored(nonsense) -> None:
    special = vocabulary(*QWEN)
    metadata = {"tokenizer.ggml.fim_pre_token_id": nonsense}
    assert find_format("qwen2", special, metadata) == find_format("qwen2", special, {})


def test_two_sentinels_of_an_unknown_family_are_no_format() -> None:
    metadata = {"tokenizer.ggml.fim_pre_token_id": 1, "tokenizer.ggml.fim_suf_token_id": 2}
    assert find_format("llama", {"<x>": 1, "<y>": 2}, metadata) is None


def test_codestral_has_no_middle_even_if_its_vocabulary_has() -> None:
    special = vocabulary("[PREFIX]", "[SUFFIX]", "[MIDDLE]", "</s>")
    found = find_format("mistral", special, {})
    assert found is not None
    assert (found.order, found.middle) == ("spm", None)


def test_custom_tokens_are_named_by_the_user() -> None:
    special = vocabulary("<filename>", "<gh_stars>", "<issue_start>")
    made = custom_format("<filename>", "<gh_stars>", "<issue_start>", special)
    assert (made.prefix.token_id, made.suffix.token_id) == (100, 101)
    assert made.stop_token_ids == (100, 101, 102)


def test_custom_tokens_must_exist_and_differ() -> None:
    special = vocabulary("<filename>", "<gh_stars>")
    with pytest.raises(InvalidRequestError, match="'<nope>' is not a special token"):
        custom_format("<filename>", "<gh_stars>", "<nope>", special)
    with pytest.raises(InvalidRequestError, match="must differ"):
        custom_format("<filename>", "<gh_stars>", "<filename>", special)
