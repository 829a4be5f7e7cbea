"""Documents are recognised by their text, per tenant, within a bounded memory."""

import random
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.infill.document_store import Document, DocumentStore
from midfill.infill.prefix_cut import CutHistory
from midfill.infill.view import View


def source(seed: int, lines: int = 300) -> str:
    chance = random.Random(seed)
    words = [f"{chance.choice('abcdefgh')}{chance.randrange(1000)}" for _ in range(50)]
    return "# licence header\n" * 8 + "".join(
        f"    {chance.choice(words)} = {chance.choice(words)}({chance.randrange(100)})\n"
        for _ in range(lines)
    )


def put(
    store: DocumentStore, text: str, caret: int, tenant: str = "", name: str | None = None
) -> Document:
    """Find or make the document, as the planner does, without windows."""
    prefix, suffix = text[:caret], text[caret:]
    found = store.find(tenant, name, prefix, suffix)
    if found is None:
        document = store.create(tenant, name, View.of(prefix, suffix), CutHistory())
    else:
        document = found[0]
        document.view = View.of(prefix, suffix)
        document.name = name or document.name
    store.record(document)
    return document


def test_edited_states_of_a_document_are_recognised() -> None:
    store = DocumentStore(10**8)
    text = source(1)
    first = put(store, text, 3000)
    typed = text[:3000] + "x = 1" + text[3000:]
    assert put(store, typed, 3005) is first
    assert put(store, typed, 9) is first  # the caret jumped
    assert put(store, "import os\n" + typed, 5000) is first  # changed at the top
    assert put(store, ("import os\n" + typed)[:-40], 5000) is first  # and at the end
    assert put(store, typed[2000:], 50) is first  # a third deleted at once
    assert len(store) == 1


def test_other_documents_are_other_documents() -> None:
    store = DocumentStore(10**8)
    ids = {put(store, source(seed), 2000).id for seed in range(50)}
    assert len(ids) == 50
    assert {put(store, source(seed), 2010).id for seed in range(50)} == ids


def test_a_window_on_a_document_is_recognised_after_others_were_used() -> None:
    store = DocumentStore(10**8)
    texts = [source(seed) for seed in range(20)]
    documents = [put(store, text[1000:5000], 2000) for text in texts]
    for text, document in zip(texts, documents, strict=True):
        assert put(store, text[1103:5103], 2000) is document


def test_growing_from_nothing_is_one_document() -> None:
    store = DocumentStore(10**8)
    text = "def f(x):\n    return x + 1\n"
    ids = {put(store, text[:end], end).id for end in range(len(text) + 1)}
    assert len(ids) == 1


def test_tenants_never_share_a_document() -> None:
    store = DocumentStore(10**8)
    text = source(1)
    assert put(store, text, 100, tenant="a") is not put(store, text, 100, tenant="b")
    assert store.find("c", None, text[:100], text[100:]) is None
    assert store.find("c", "name", text[:100], text[100:]) is None


def test_a_name_distinguishes_equal_texts() -> None:
    store = DocumentStore(10**8)
    text = source(1)
    a = put(store, text, 100, name="a.py")
    b = put(store, text, 100, name="b.py")
    assert a is not b
    assert put(store, text + "x", 100, name="a.py") is a
    assert put(store, text + "x", 100) in (a, b)  # unnamed: the text decides


def test_a_wrong_name_does_not_make_two_texts_one_document() -> None:
    store = DocumentStore(10**8)
    first = put(store, source(1), 100, name="a.py")
    assert put(store, source(2), 100, name="a.py") is not first


def test_memory_is_bounded_and_the_longest_unused_goes_first() -> None:
    texts = [source(seed) for seed in range(30)]
    one = DocumentStore(10**8)
    put(one, texts[0], 100)
    limit = 10 * one.held_bytes
    store = DocumentStore(limit)
    first = put(store, texts[0], 100)
    second = put(store, texts[1], 100)
    for text in texts[2:]:
        put(store, text, 100)
        put(store, texts[0], 100)  # kept alive by use
        assert store.held_bytes <= limit
    assert 5 <= len(store) <= 11
    assert put(store, texts[0], 100) is first
    assert store.get(second.id) is None


def test_ids_dont_count_documents() -> None:
    """A tenant can't tell from its documents' ids how many the others have opened meanwhile."""
    store = DocumentStore(10**8)
    ids = {put(store, source(seed), 100).id for seed in range(20)}
    assert len(ids) == 20
    assert all(re.fullmatch("document-[0-9a-f]{16}", one) for one in ids)


def test_one_document_larger_than_the_memory_is_still_kept() -> None:
    store = DocumentStore(100)
    document = put(store, source(1), 100)
    assert put(store, source(1), 200) is document


steps = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(["x", "y", None]), st.integers(0, 5)),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(steps)
def test_sizes_keys_and_tenants_stay_consistent(requests) -> None:
    """A store of a few documents under eviction: sizes, keys and tenants stay consistent."""
    texts = [source(seed, lines=40) for seed in range(6)]
    store = DocumentStore(4 * 12_000)
    for tenant, name, number in requests:
        document = put(store, texts[number], 500 + 7 * number, tenant, name)
        assert document.tenant == tenant
        assert name is None or document.name == name
        held = list(store._recent.values())
        assert store.held_bytes == sum(store._sizes.values())
        assert set(store._sizes) == {document.id for document in held}
        assert {document.tenant for document in held} == set(store._indexes)
        for index in store._indexes.values():
            filed = {one for documents in index._by_key.values() for one in documents}
            assert filed == set(index._keys) <= set(store._recent)
