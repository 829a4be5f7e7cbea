"""What tests of several folders share: a tiny model with sentinels and a chat template."""

import json
from pathlib import Path

import pytest
from tiny_checkpoints import write_tiny

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|endoftext|>' + message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|endoftext|>assistant: ' }}{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 320 tokens and 512 tokens of context, with FIM tokens and a chat template."""
    return _write(tmp_path_factory.mktemp("tiny") / "tiny-llama")


def _write(folder: Path) -> Path:
    write_tiny("llama", folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"chat_template": CHAT_TEMPLATE}
    path.write_text(json.dumps(settings))
    return folder
