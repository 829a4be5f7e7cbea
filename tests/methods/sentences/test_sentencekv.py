"""SentenceKV: what its options mean, and which are refused."""

from pathlib import Path

import pytest
from fake_keys import CONFIG
from tiny_checkpoints import write_variant

from midfill.errors import InvalidRequestError
from midfill.methods.registry import resolve_method
from midfill.methods.sentences.method import EndTokens
from midfill.methods.sentences.selection import SentenceRule
from midfill.methods.sentences.sentencekv import SentenceKV
from midfill.methods.served_model import ServedModel
from midfill.models.checkpoints.opening import open_checkpoint

TEXTS = [b".", b"\n", b"a", b" ?", b"b\n", *[b"x"] * (CONFIG.vocab - 5)]


def test_a_budget_is_what_rows_read_and_several_times_as_much_is_retained() -> None:
    method = resolve_method("sentencekv:budget=256,keep=3,recent=20,warm=all")
    assert isinstance(method, SentenceKV)
    ready = method.for_model(ServedModel(CONFIG, token_bytes=TEXTS.__getitem__))
    assert ready.rule == SentenceRule(256, 768, 32, 20, 32, 7, 1, reads_all=True)
    assert isinstance(ready.ends, EndTokens)
    assert ready.ends.ends.tolist() == [True, False, False, True, *[False] * (CONFIG.vocab - 4)]
    lines = SentenceKV(unit="line").for_model(ServedModel(CONFIG, token_bytes=TEXTS.__getitem__))
    assert isinstance(lines.ends, EndTokens)
    assert lines.ends.ends.nonzero()[0].tolist() == [1, 4]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("budget=64", "budget must be above the 64 tokens of start and recent, not 64"),
        ("budget=20,start=4", "budget must be above the 36 tokens of start and recent, not 20"),
        ("keep=0.5", "keep must be at least 1, not 0.5"),
        ("keep=nan", "keep must be at least 1, not nan"),
        ("start=-1", "start must be at least 0, not -1"),
        ("recent=0", "recent must be at least 1, not 0"),
        ("warmup=0", "warmup must be at least 1, not 0"),
        ("window=0", "window must be at least 1, not 0"),
        ("window=640", r"keep \* budget must be above the window's 640 tokens, not 640"),
        ("kernel=4", "kernel must be a positive odd number, not 4"),
        ("warm=cold", "warm must be reuse or all, not 'cold'"),
        ("unit=word", "unit must be sentence or line, not 'word'"),
    ],
)
def test_nonsense_is_refused(options: str, error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        resolve_method(f"sentencekv:{options}")


def test_it_needs_the_text_of_tokens_and_layers_that_see_everything(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="by the text of tokens, which this engine"):
        SentenceKV().for_model(ServedModel(CONFIG))
    windowed = open_checkpoint(write_variant("mistral", tmp_path / "mistral")).config
    with pytest.raises(InvalidRequestError, match="layers of this one see 24 tokens"):
        SentenceKV().for_model(ServedModel(windowed, token_bytes=TEXTS.__getitem__))
