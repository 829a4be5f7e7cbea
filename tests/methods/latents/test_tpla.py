"""TPLA by name: what it needs."""

import pytest
from tiny_checkpoints import write_variant

from midfill.errors import InvalidRequestError
from midfill.methods.latents.method import PartedLatents
from midfill.methods.latents.tpla import Tpla
from midfill.methods.registry import resolve_method
from midfill.methods.served_model import ServedModel
from midfill.models.checkpoints.opening import open_checkpoint


def test_it_needs_latents_in_parts(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = open_checkpoint(write_variant("deepseek2", tmp_path_factory.mktemp("tiny"))).config
    method = resolve_method("tpla")
    assert isinstance(method, Tpla)
    assert isinstance(method.for_model(ServedModel(config, latent_parts=2)), PartedLatents)
    with pytest.raises(InvalidRequestError, match=r"^tpla: needs .* --latent-parts 2$"):
        method.for_model(ServedModel(config))
