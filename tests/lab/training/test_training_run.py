"""Preparing a run: sentinels, end token, protected and held-out texts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tiny_checkpoints import SPECIAL_TOKENS, tiny_tokenizer, write_tiny

from midfill.errors import InvalidRequestError, MidfillError
from midfill.infill.formats import find_format
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill_lab.training.corpus import Corpus
from midfill_lab.training.recipe import TrainingRecipe
from midfill_lab.training.training_run import (
    RunInputs,
    TrainingRun,
    choose_end_token,
    choose_fim_format,
    open_stream,
)

Start = Callable[..., TrainingRun]


def with_special_tokens(folder: Path, *names: str) -> Checkpoint:
    """Return the tiny llama with its special tokens renamed, and those without a name removed."""
    write_tiny("llama", folder)
    content = tiny_tokenizer().to_str()
    tokenizer = json.loads(content)
    renamed = dict(zip(SPECIAL_TOKENS, names, strict=False))
    kept = [each for each in tokenizer["added_tokens"] if each["content"] in renamed]
    for each in kept:
        each["content"] = renamed[each["content"]]
    tokenizer["added_tokens"] = kept
    vocabulary = tokenizer["model"]["vocab"]
    for old in SPECIAL_TOKENS:
        vocabulary[renamed.get(old, f"unused {old}")] = vocabulary.pop(old)
    tokenizers.Tokenizer.from_str(json.dumps(tokenizer)).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return open_checkpoint(folder)


def test_a_models_own_format_is_taken(tiny: Checkpoint) -> None:
    format = choose_fim_format(tiny, None)
    assert format == find_format("llama", tiny.tokenizer.special_tokens, tiny.metadata)
    assert format.prefix.text == "<fim_prefix>"


def test_named_tokens_precede_it(tiny: Checkpoint) -> None:
    format = choose_fim_format(tiny, ("<fim_middle>", "<fim_prefix>", "<fim_suffix>"))
    assert format.prefix.text == "<fim_middle>"
    with pytest.raises(InvalidRequestError, match="'<nothing>' is not a special token"):
        choose_fim_format(tiny, ("<nothing>", "<fim_prefix>", "<fim_suffix>"))


def test_spare_tokens_are_proposed_without_end_tokens(tmp_path: Path) -> None:
    checkpoint = with_special_tokens(tmp_path, "<|endoftext|>", "<a>", "<b>", "<c>")
    with pytest.raises(MidfillError, match=r"--fim-tokens PRE,SUF,MID. It has: <a>, <b>, <c>$"):
        choose_fim_format(checkpoint, None)


def test_a_tokenizer_without_spare_tokens_is_refused(tmp_path: Path) -> None:
    checkpoint = with_special_tokens(tmp_path, "<|endoftext|>", "<a>")
    message = r"no FIM tokens and too few spare special tokens to serve as such \(<a>\); add three"
    with pytest.raises(MidfillError, match=message):
        choose_fim_format(checkpoint, None)


def test_end_of_text_ends_an_answer(tiny: Checkpoint, tmp_path: Path) -> None:
    assert choose_end_token(tiny, choose_fim_format(tiny, None)) == 0
    other = with_special_tokens(tmp_path, "</s>", "<a>", "<b>", "<c>")
    assert choose_end_token(other, choose_fim_format(other, ("<a>", "<b>", "<c>"))) == 0


def test_a_formats_own_end_token_comes_first(tmp_path: Path) -> None:
    codellama = with_special_tokens(tmp_path, "▁<EOT>", "▁<PRE>", "▁<SUF>", "▁<MID>")
    assert choose_end_token(codellama, choose_fim_format(codellama, None)) == 0


def test_copies_of_protected_and_held_out_texts_are_refused(
    tiny: Checkpoint, corpus: Path, recipe: TrainingRecipe, tmp_path: Path
) -> None:
    texts = [path.read_text() for path in sorted((corpus / "package").iterdir())]
    protected = tmp_path / "evaluation.jsonl"
    protected.write_text(json.dumps({"task_id": "T/0", "prompt": texts[0][200:500]}) + "\n")
    held_out = tmp_path / "held"
    held_out.mkdir()
    (held_out / "old_version.py").write_text(texts[1] + "\n# an older version\n")
    stream = open_stream(
        tiny,
        choose_fim_format(tiny, None),
        recipe,
        RunInputs(
            documents=Corpus.find([corpus], (".py",)),
            folder=tmp_path,
            protected=Corpus.find([protected], (".py",)),
            held_out=Corpus.find([held_out], (".py",)),
        ),
    )
    for _ in stream.read_examples():
        if stream.position.epoch:
            break
    assert stream.refused == {"contaminated": 1, "duplicate": 1}
    assert len(stream.manifest) == 10


def test_documents_of_any_licence_are_accepted_on_request(
    tiny: Checkpoint, recipe: TrainingRecipe, tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text("\n".join(f"value_{n} = compute({n})" for n in range(40)))
    documents = Corpus.find([tmp_path], (".py",))
    inputs = RunInputs(documents=documents, folder=tmp_path, any_licence=True)
    stream = open_stream(tiny, choose_fim_format(tiny, None), recipe, inputs)
    assert next(stream.rows()).characters
    assert stream.licences == {"unknown": 1}
