"""DescribedModel: what prompts need to know of a model, which may be served elsewhere."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from midfill.models.tokens.tokenizer import Tokenizer


class DescribedModel(Protocol):
    """A model's tokenizer and statements; every ``Checkpoint`` is one."""

    @property
    def path(self) -> Path:
        """File or folder of its description, for errors."""
        ...

    @property
    def metadata(self) -> Mapping[str, object]:
        """See ``Checkpoint``."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        ...
