"""Codecs of stored KV by name: what "cachegen:deep=16" means.

A codec's module is imported when it is first asked for.
"""

from collections.abc import Callable

from midfill.errors import InvalidRequestError
from midfill.kv.tiers.warm_tier import ChunkCodec
from midfill.methods.registry import OFF
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.runners.forward.runner import Runner
from midfill.specifications import make_options, nearest_name

CODECS = ("cachegen",)


def check_codec(specification: str) -> None:
    """Check that there is a codec "name:option=value,option=value"; "none" is none.

    Raises:
        InvalidRequestError: there is no such codec or option, or a value doesn't fit.
    """
    name, _, settings = specification.partition(":")
    if name == OFF and not settings:
        return
    if name not in CODECS:
        known = [*CODECS] if name == OFF else [OFF, *CODECS]
        raise InvalidRequestError(
            f"there is no codec {name!r}{nearest_name(name, known)}", param="codec"
        )
    from midfill.methods.store.cachegen import CacheGen

    make_options(CacheGen, name, settings, param="codec")


def open_codec(
    specification: str, runner: Runner, tokenizer: Tokenizer, name: Callable[[], str]
) -> ChunkCodec | None:
    """Return a codec for a runner's KV; None writes it as it was computed.

    Args:
        specification: see ``check_codec``.
        runner: the model, not in use yet: its slots may be overwritten.
        tokenizer: the model's.
        name: returns the name of the model's KV.

    Raises:
        InvalidRequestError: there is no such codec, or it doesn't suit the KV.
    """
    check_codec(specification)
    codec, _, settings = specification.partition(":")
    if codec == OFF:
        return None
    if runner.config.vectors_per_cell == 1:
        raise InvalidRequestError(
            f"the codec {codec!r} is not possible with latent attention, whose keys are values, "
            f"too; leave it out, or give {OFF!r}",
            param="codec",
        )
    if runner.config.kv_sharing_layers:
        raise InvalidRequestError(
            f"the codec {codec!r} is not possible with models some of whose layers share their KV; "
            f"leave it out, or give {OFF!r}",
            param="codec",
        )
    from midfill.methods.store.cachegen import CacheGen, CacheGenCodec, KvShape
    from midfill.methods.store.cachegen_profile import load_tables

    method = make_options(CacheGen, codec, settings, param="codec")
    config = runner.config
    dtype = runner.cells.layout.dtype
    shape = KvShape(dtype, config.layers, config.kv_heads, config.head_dim)
    return CacheGenCodec(method, shape, load_tables(method, shape, runner, tokenizer, name()))
