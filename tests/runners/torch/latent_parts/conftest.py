"""A small model with latent attention, most of whose latents' energy lies along few directions."""

from collections.abc import Iterator

import pytest
import torch
from naive_latents import LatentModel, load_latent_model, planted

from midfill.runners.torch.latent_parts.rotation import LatentRotation


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices are so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> LatentModel:
    loaded = load_latent_model(tmp_path_factory.mktemp("latents"), first_k_dense_replace=3)
    weights = planted(loaded.weights, 128, decay=3.0, sharpness=2.0)
    return LatentModel(loaded.checkpoint, weights, loaded.texts)


@pytest.fixture(scope="package")
def rotation(model: LatentModel) -> LatentRotation:
    return model.rotation()
