"""Accumulated attention: what is remembered of prompts' beginnings, and for whom."""

import numpy as np

from midfill.methods.evict.accumulated_attention import ObservationMemory, block_digests


def test_a_prompts_beginning_is_remembered_by_its_tokens_and_tenant() -> None:
    tokens = np.arange(200, dtype=np.int32)
    digests = block_digests(tokens, 64, "ann")
    assert len(digests) == 3
    assert block_digests(tokens[:150], 64, "ann") == digests[:2]
    assert block_digests(tokens[:128], 64, "ann") == digests[:1], "the last token always runs"
    assert not set(digests) & set(block_digests(tokens, 64, "bob"))
    assert not set(digests) & set(block_digests(tokens + 1, 64, "ann"))


def test_what_was_used_least_recently_is_forgotten_first() -> None:
    memory = ObservationMemory(max_bytes=3 * 40)
    scores = [np.full(10, float(i), np.float32) for i in range(4)]
    names = [b"0", b"1", b"2", b"3"]
    for name, each in zip(names[:3], scores, strict=False):
        memory.remember(name, [each])
    assert memory.longest([b"0"]) == (1, [scores[0]])
    memory.remember(names[3], [scores[3]])
    assert memory.longest([b"1"]) == (0, [])
    assert memory.longest([b"0", b"x", b"3", b"1"])[0] == 3
