"""ModelService: a request that is over leaves nothing behind."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from midfill.checkpoints.opening import open_checkpoint
from midfill.config import ModelOptions
from midfill.engine.client import EngineClient
from midfill.frontend.prompts import PromptEncoder
from midfill.frontend.sampling import SamplingParams
from midfill.infill.request import InfillRequest
from midfill.server.service import ModelService


@pytest.fixture
def encoder(tiny_folder: Path) -> PromptEncoder:
    return PromptEncoder(open_checkpoint(tiny_folder), None, context=512)


@pytest.fixture
def service(tiny_folder: Path, encoder: PromptEncoder) -> Iterator[ModelService]:
    engine = EngineClient(tiny_folder, ModelOptions())
    tokenizer = open_checkpoint(tiny_folder).tokenizer
    service = ModelService("tiny", engine, tokenizer, encoder, 1 << 20)
    yield service
    service.close()


def test_the_texts_of_a_generation_go_with_it(
    service: ModelService, encoder: PromptEncoder
) -> None:
    """They are in no cycle, which would keep them until garbage is collected."""
    prompt = encoder.infill(InfillRequest(prefix="a", raw=True))
    gc.disable()
    try:
        generation = service.generate([prompt], SamplingParams(), "", streamed=False)
        gone = weakref.ref(generation)
        del generation
        assert gone() is None
    finally:
        gc.enable()
