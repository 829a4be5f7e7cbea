"""Common prefix and suffix agree with counting characters one by one."""

from itertools import takewhile

from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.infill.common_affixes import common_prefix, common_suffix

texts = st.text(alphabet="ab\né😀", max_size=40)


@settings(deadline=None)
@given(texts, texts, texts)
def test_common_prefix_is_what_a_naive_count_finds(shared: str, a: str, b: str) -> None:
    a, b = shared + a, shared + b
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    assert common_prefix(a, b) == sum(1 for _ in equal)


@settings(deadline=None)
@given(texts, texts, texts)
def test_common_suffix_is_the_mirror_image(shared: str, a: str, b: str) -> None:
    a, b = a + shared, b + shared
    assert common_suffix(a, b) == common_prefix(a[::-1], b[::-1])
