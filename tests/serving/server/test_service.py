"""ModelService: what is refused is not encoded, and what is over leaves nothing behind."""

import asyncio
import gc
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from midfill.config import ModelOptions
from midfill.engine.process.client import EngineClient
from midfill.engine.scheduling.admission import NEW_DOCUMENT
from midfill.errors import QueueFullError
from midfill.frontend.prompt import PromptSource
from midfill.frontend.prompt_encoder import PromptEncoder
from midfill.frontend.sampling import SamplingParams
from midfill.infill.request import InfillRequest
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.serving.server.request import GenerationRequest, RequestRecord, current_request
from midfill.serving.server.service import ModelService


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
        generation = service.generate(GenerationRequest([prompt], SamplingParams(), ""))
        gone = weakref.ref(generation)
        del generation
        assert gone() is None
    finally:
        gc.enable()


class FullForNewDocuments(EngineClient):
    """An engine whose queue is too long for documents that nobody asked about before."""

    known: str | None = None

    def check_admission(self, tenant: str, deadline: float | None, document: str = "") -> None:
        if document not in ("", self.known):
            raise QueueFullError("too long", retry_after=1)


def test_where_the_queue_is_long_the_first_request_of_a_document_is_not_encoded(
    tiny_folder: Path, encoder: PromptEncoder
) -> None:
    checkpoint = open_checkpoint(tiny_folder)
    engine = FullForNewDocuments(tiny_folder, ModelOptions())
    service = ModelService("tiny", engine, checkpoint.tokenizer, encoder, 1 << 20)
    text = "".join(f"line {number}\n" for number in range(40))

    def ask(prefix: str) -> str | None:
        request = InfillRequest(prefix=prefix, suffix="after")
        (prompt,) = asyncio.run(service.encode([PromptSource(text=request)]))
        return None if prompt.report is None else prompt.report.document

    token = current_request.set(
        RequestRecord(
            request_id="id", method="POST", path="/v1/completions", arrived=time.perf_counter()
        )
    )
    try:
        with pytest.raises(QueueFullError):
            ask(text)
        assert encoder.memory()["documents"].held_bytes == 0
        first = encoder.infill(InfillRequest(prefix=text, suffix="after"))
        assert first.report is not None
        engine.known = first.report.document
        assert engine.known != NEW_DOCUMENT
        assert ask(text + "mo") == engine.known
        with pytest.raises(QueueFullError):
            ask("something else " * 30)
        raw = InfillRequest(prefix="raw", raw=True)
        asyncio.run(service.encode([PromptSource(text=raw)]))
    finally:
        current_request.reset(token)
        service.close()
