"""The digest of what decides a model's answers."""

import hashlib

from midfill.models.checkpoints.checkpoint import FRAGMENTS_KEY, SNIPPETS_KEY, Checkpoint
from midfill.models.checkpoints.model_record import (
    cut_rule_of,
    empty_threshold_of,
    end_bias_of,
    opens_lines_of,
    snippet_characters_of,
    window_rule_of,
)


def fingerprint_of(checkpoint: Checkpoint) -> str:
    """Return a digest of what decides a model's answers: its weights, and its rules of layout."""
    rules = (cut_rule_of(checkpoint), window_rule_of(checkpoint), end_bias_of(checkpoint))
    text = f"{checkpoint.fingerprint} {rules} {checkpoint.metadata.get(FRAGMENTS_KEY) is True}"
    if threshold := empty_threshold_of(checkpoint):  # off, it leaves earlier digests valid
        text += f" {threshold}"
    if opens_lines_of(checkpoint):
        text += " opens lines"
    if SNIPPETS_KEY in checkpoint.metadata:
        text += f" snippets {snippet_characters_of(checkpoint)}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]
