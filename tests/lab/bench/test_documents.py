"""Text to measure with: real files, the same for a seed, and unseen where that matters."""

import hashlib
import json
from pathlib import Path

import pytest

from midfill.errors import MidfillError
from midfill.lab.bench import documents
from midfill.lab.bench.documents import (
    standard_library_documents,
    trained_hashes,
    unseen_documents,
)


def test_documents_are_real_files_of_the_wanted_size_and_the_same_for_a_seed() -> None:
    documents = standard_library_documents(4, seed=3)
    assert all(6000 <= len(text) <= 9000 for text in documents)
    assert len(set(documents)) == 4
    assert documents == standard_library_documents(4, seed=3)
    with pytest.raises(ValueError, match="only"):
        standard_library_documents(10**6)


def test_manifests_of_shipped_adapters_are_known() -> None:
    hashes = trained_hashes()
    assert len(hashes) > 1000
    assert all(len(value) == 64 for value in hashes)


def test_unseen_documents_are_in_no_manifest_and_say_where_they_come_from() -> None:
    pytest.importorskip("torch")  # whose files are among them
    chosen = unseen_documents(5, seed=1)
    assert chosen == unseen_documents(5, seed=1)
    assert all(6000 <= len(text) <= 9000 for text in chosen.texts)
    assert not trained_hashes() & {hashlib.sha256(t.encode()).hexdigest() for t in chosen.texts}
    assert "numpy" in chosen.source
    assert "torch" in chosen.source


def test_documents_that_an_adapter_was_trained_on_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    chosen = unseen_documents(60).texts
    trained = {hashlib.sha256(text.encode()).hexdigest() for text in chosen[:30]}
    (tmp_path / "adapter").mkdir()
    lines = [json.dumps({"name": "train/x.py", "sha256": value}) + "\n" for value in trained]
    (tmp_path / "adapter" / "manifest.jsonl").write_text("".join(lines))
    monkeypatch.setattr(documents, "SHIPPED_ADAPTERS", tmp_path)
    left = {hashlib.sha256(text.encode()).hexdigest() for text in unseen_documents(60).texts}
    assert trained == trained_hashes()
    assert not trained & left
    with pytest.raises(MidfillError, match="wanted files are in numba"):
        unseen_documents(10**6)
