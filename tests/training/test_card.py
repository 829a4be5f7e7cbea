"""The model card says what was made of what."""

from typing import Any

from midfill.training.card import model_card

RECORD: dict[str, Any] = {
    "base": {"name": "tiny", "digest": "0" * 64, "licence": "Apache-2.0"},
    "fim": {"prefix": "<a>", "suffix": "<b>", "middle": "<c>", "stop": ["<end>"]},
    "fragments": True,
    "training": {"steps": 12},
    "data": {"licences": {"MIT": 3, "ISC": 1}},
    "recipe": {"rank": 4, "data": {"line": 0.5}},
}


def test_an_adapters_card() -> None:
    card = model_card(RECORD, adapter=True)
    head = card.split("---\n")[1].splitlines()
    assert head[:3] == ["library_name: peft", "base_model: tiny", "license: apache-2.0"]
    assert "# tiny, taught to infill" in card
    assert "midfill serve tiny --adapter FOLDER" in card
    assert "`<a>` prefix[:k] `<b>` suffix `<c>` prefix[k:]" in card
    assert "ends with `<end>`" in card
    assert "arXiv 2505.21889" in card
    for row in ("| steps | 12 |", "| licences.MIT | 3 |", "| rank | 4 |", "| data.line | 0.5 |"):
        assert row in card
    assert max(map(len, card.splitlines())) < 130


def test_a_models_card() -> None:
    card = model_card({**RECORD, "fragments": False}, adapter=False)
    assert "library_name: transformers" in card
    assert "`midfill serve FOLDER` runs it" in card
    assert "tokenised as a whole" in card


def test_a_base_without_licence_and_with_its_own_format() -> None:
    record = {**RECORD, "base": {"name": "tiny", "licence": None}}
    del record["fim"]
    card = model_card(record, adapter=True)
    assert "license: unknown" in card
    assert "the base's own infilling format" in card
