"""DeepSeek's beta path through the official OpenAI client, as its documentation shows it."""

import openai
import pytest
from running_server import RunningServer

BODY = {"prompt": "x = 1\nz = toke", "suffix": ")\nprint(x)\n", "temperature": 0, "max_tokens": 12}


@pytest.mark.parametrize("base", ["/beta", "/beta/v1"])
def test_completions_with_a_suffix(server: RunningServer, base: str) -> None:
    client = openai.OpenAI(base_url=server.url + base, api_key="none", max_retries=0)
    answer = client.completions.create(model="tiny-llama", **BODY)  # type: ignore[call-overload]
    assert answer.choices[0].text == server.complete(**BODY)["choices"][0]["text"] != ""
    stream = client.completions.create(  # type: ignore[call-overload]
        model="tiny-llama", **BODY, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.completions.create(model="deepseek-chat", prompt="a")
