"""Infill over HTTP with any OpenAI client. Start the server first: make serve."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="unused")
answer = client.completions.create(
    model="smollm2-135m",
    prompt="def area(width, height):\n    return wid",
    suffix="\n\n\nprint(area(2, 3))\n",
    temperature=0,
)
print(answer.choices[0].text)
