"""Nulls of methods that keep keys at few bits: as many bytes, without the method's idea.

ZipCache's give its bits to tokens at random, to those with most accumulated attention, or to all
alike; KIVI's quantises keys as it quantises values.
"""

from dataclasses import asdict, replace

from midfill.arrays import Float32Array, Int32Array
from midfill.kv.quantized import Float16Array, QuantizedBlock
from midfill.kv.quantized_layout import BITS_PER_CODE
from midfill.methods.budget import require
from midfill.methods.quantize.kivi import Kivi
from midfill.methods.quantize.quantizers import quantize_tokens
from midfill.methods.quantize.zipcache import EXACT, NAME, ZipCache
from midfill_lab.bench.methods.spending import prompt_generator


class RandomSplit(ZipCache):
    """More bits for tokens at random, other ones in each head."""

    def saliency(self, received: Float32Array, probes: Int32Array) -> Float32Array:
        """Return random numbers [n], which follow from the attention and so from the prompt."""
        numbers: Float32Array = prompt_generator(received.view("i4")).random(len(received), "f4")
        return numbers


class UniformPerToken(ZipCache):
    """As many bits for all tokens, with scales and zeros per token, of keys as of values."""

    def encode(
        self, keys: Float32Array, values: Float32Array, bits: int, magnitudes: Float16Array
    ) -> QuantizedBlock:
        """See ``ZipCache.encode``."""
        return QuantizedBlock.of(
            quantize_tokens(keys, self.keys or bits), quantize_tokens(values, bits)
        )


class KeysPerToken(Kivi):
    """Scales and zeros per token, of keys as of values."""

    def encode(self, keys: Float32Array, values: Float32Array) -> list[QuantizedBlock]:
        """See ``Kivi.encode``."""
        groups = self.value_groups(keys.shape[-1])
        return QuantizedBlock.of_several(
            quantize_tokens(keys, self.bits, groups), quantize_tokens(values, self.bits, groups)
        )


def random_split(settings: object) -> ZipCache:
    """Return ZipCache that gives its bits to tokens at random."""
    return RandomSplit(**asdict(_zipcache(settings)))


def accumulated_attention(settings: object) -> ZipCache:
    """Return ZipCache whose saliency is the sum of all rows' attention, H2O's score."""
    return replace(_zipcache(settings), normalize="none", recent=0.0, random=1.0)


def uniform_bits(settings: object) -> ZipCache:
    """Return ZipCache that has one class, of the most bits that its average allows."""
    return replace(_zipcache(settings), high=_average_bits(settings), salient=1.0)


def uniform_bits_per_token(settings: object) -> ZipCache:
    """Return ``uniform_bits`` with parameters per token."""
    return UniformPerToken(**asdict(uniform_bits(settings)))


def keys_per_token(settings: object) -> Kivi:
    """Return KIVI that quantises keys as it does values."""
    assert isinstance(settings, Kivi)
    return KeysPerToken(**asdict(settings))


def _average_bits(settings: object) -> int:
    """Return the most bits per number that all tokens can have for what ZipCache spends."""
    method = _zipcache(settings)
    require(method.high != EXACT, "16 bits can't be spread: have high at most 8", NAME)
    average = method.salient * method.high + (1 - method.salient) * method.low
    return max(bits for bits in BITS_PER_CODE if bits <= average)


def _zipcache(settings: object) -> ZipCache:
    assert isinstance(settings, ZipCache)
    return settings
