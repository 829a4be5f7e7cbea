"""MInference from its search to a request, and what the default model comes with."""

from pathlib import Path

import pytest
from tiny_checkpoints import write_tiny

from midfill.errors import InvalidRequestError
from midfill.frontend.sampling import SamplingParams
from midfill.llm import LLM
from midfill.methods.calibration_store import read, shipped_path
from midfill.methods.served_model import ServedModel
from midfill.methods.sparse_prefill.minference import (
    CANDIDATES,
    NAME,
    VERSION,
    HeadPatterns,
    MInference,
    choose_patterns,
)
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, REGISTERED, resolve_adapter
from midfill.models.checkpoints.opening import model_digest, open_checkpoint, open_model
from midfill_lab.calibration.calibrate import calibrate

SEARCH = "minference:tokens=600,texts=2,budget=0.5"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(
        "llama", tmp_path_factory.mktemp("tiny") / "long", max_position_embeddings=2048
    )


def test_a_search_is_asked_for_and_its_result_used(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    model = ServedModel(config=checkpoint.config, digest=model_digest(checkpoint))
    with pytest.raises(InvalidRequestError, match="midfill methods calibrate minference"):
        MInference().for_model(model)
    table = read(calibrate(SEARCH, checkpoint))
    assert table is not None
    config = checkpoint.config
    for numbers in table.tables.values():
        assert numbers.shape == (config.layers, config.query_heads)
    assert (table.tables["mass"] > table.tables["cost"]).all()
    assert table.tables["cost"].max() <= 0.5
    method = MInference(chunk=256, dense=256).for_model(model)
    assert isinstance(method, HeadPatterns)
    assert len(method.patterns) == config.layers
    text = "total = 1\n" * 60
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    with LLM(str(folder), threads=1, kv_memory=4 << 20) as llm:
        exact = llm.generate(text, greedy)[0].text
        named = llm.generate(text, greedy, method="minference:chunk=256,dense=256,scale=100")
        assert named[0].text == exact
        found = llm.generate(text, greedy, method="minference:chunk=256,dense=256")[0]
        assert found.answers[0].finish_reason == "length"


@pytest.mark.real_model
def test_the_default_model_comes_with_its_patterns() -> None:
    checkpoint = open_model(REGISTERED[DEFAULT_MODEL].path, resolve_adapter(DEFAULT_MODEL, None))
    digest = model_digest(checkpoint)
    shipped = read(shipped_path(NAME, digest))
    assert shipped is not None, "calibrate it and ship the file: docs/methods.md"
    shipped.check(NAME, VERSION, digest)
    patterns = choose_patterns(shipped.tables, 1.0)
    assert len(patterns) == checkpoint.config.layers
    assert shipped.tables["pattern"].max() < len(CANDIDATES)
    assert shipped.tables["mass"].mean() > 0.9 > 0.2 >= shipped.tables["cost"].mean()
