"""Infill over HTTP with any OpenAI client. Start the server first: make serve."""

import os

from openai import OpenAI

url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1")
client = OpenAI(base_url=url, api_key="unused")
answer = client.completions.create(
    model="smollm2-135m",
    prompt='def area(width, height):\n    """The area of a rectangle."""\n    return wid',
    suffix="\n\n\nprint(area(2, 3))\n",
    temperature=0,
)
print(answer.choices[0].text)
