"""The default model, for what methods must do on a real one."""

import pytest
from default_model import DefaultModel


@pytest.fixture(scope="session")
def default_model() -> DefaultModel:
    return DefaultModel()
