"""What methods of reuse share."""

import pytest

from midfill.errors import InvalidRequestError
from midfill.methods.reuse.cacheblend import CacheBlend
from midfill.methods.reuse.kvshare import KVShare
from midfill.methods.served_model import ServedModel
from midfill.models.config import ModelConfig


@pytest.mark.parametrize("method", [CacheBlend, KVShare])
def test_a_model_needs_a_layer_above_the_check_layer(method: type[CacheBlend | KVShare]) -> None:
    config = ModelConfig(
        family="llama", layers=3, hidden=8, query_heads=2, kv_heads=2, head_dim=4, ffn=8,
        vocab=10, context=100,
    )  # fmt: skip
    model = ServedModel(config)
    assert method(check_layer=1).for_model(model) == method(check_layer=1)
    with pytest.raises(InvalidRequestError, match=r"check_layer must be below 2, .* not 2"):
        method(check_layer=2).for_model(model)
