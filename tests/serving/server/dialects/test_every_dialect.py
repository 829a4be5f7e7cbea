"""Bad input in every dialect: whatever a body holds, it is answered or refused."""

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from running_server import RunningServer

from midfill.serving.server.app import DIALECTS
from midfill.serving.server.dialects.ollama import Options

MODEL = {"model": "tiny-llama"}
MESSAGES = [{"role": "user", "content": "hi"}]
EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "CompletionRequest": ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
    "ChatRequest": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
    "InfillBody": ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 2}),
    "CompletionBody": ("/completion", {"prompt": "a", "n_predict": 2}),
    "TokenizeBody": ("/tokenize", {"content": "a"}),
    "DetokenizeBody": ("/detokenize", {"tokens": [1]}),
    "GenerateBody": ("/api/generate", {**MODEL, "prompt": "a", "options": {"num_predict": 2}}),
    "ChatBody": ("/api/chat", {**MODEL, "messages": MESSAGES, "options": {"num_predict": 2}}),
    "ShowBody": ("/api/show", MODEL),
    "FimBody": ("/v1/fim/completions", {**MODEL, "prompt": "a", "max_tokens": 2}),
    "Event": ("/v1/events", {"type": "view", "completion_id": "c", "choice_index": 0}),
}
KEYS = [*Options.__struct_fields__, "layout", "role", "text"]
BODIES = [body for dialect in DIALECTS for body in dialect.bodies]

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["psm", "<fim_prefix>", "\ud800", 2**63, -(2**63), 1e308, 5e-324, -0.0])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.sampled_from(KEYS), inner)
    ),
    max_leaves=5,
)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_no_body_causes_a_server_error(
    server: RunningServer, body: type[Any], data: st.DataObject
) -> None:
    path, example = EXAMPLES[body.__name__]
    fields = [name for name in body.__struct_fields__ if name != "model"]
    sent = example | data.draw(st.dictionaries(st.sampled_from(fields), values, max_size=3))
    headers = {"content-type": "application/json"}
    response = server.post(path, content=json.dumps(sent).encode(), headers=headers)
    assert response.status_code in (200, 400), (sent, response.text)
    if response.status_code == 400:
        assert response.json()
