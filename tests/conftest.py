"""What tests of several folders share: a cache of their own, a tiny model with a chat template."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from tiny_checkpoints import write_tiny

from midfill.system.cache import cache_folder

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|endoftext|>' + message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|endoftext|>assistant: ' }}{% endif %}"
)


def pytest_configure(config: pytest.Config) -> None:
    """Keep the tests' many models out of the user's cache; compiled kernels and models are its."""
    users, tests = cache_folder(), Path(tempfile.mkdtemp(prefix="midfill-tests-"))
    for name in ("kernels", "models"):
        (users / name).mkdir(parents=True, exist_ok=True)
        (tests / name).symlink_to(users / name)
    os.environ["MIDFILL_CACHE"] = str(tests)
    config.add_cleanup(lambda: shutil.rmtree(tests, ignore_errors=True))


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
