"""The cost of a prompt is what a prefix cache lacks."""

from editing import SOURCE
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.layouts import prompts
from benchmarks.layouts.cost import PieceTokenizer, PrefixCache, PromptEncoder, count_computed
from midfill.infill.common_affixes import common_prefix
from midfill_lab.bench.editing import Round
from midfill_lab.bench.edits import psm_cuts


class TestCost:
    @settings(deadline=None)
    @given(st.lists(st.text("ab", min_size=1, max_size=12), max_size=20))
    def test_the_cache_finds_the_longest_match_of_all_prompts(self, prompts: list[str]) -> None:
        cache = PrefixCache()
        for number, prompt in enumerate(prompts):
            longest = max((common_prefix(old, prompt) for old in prompts[:number]), default=0)
            assert cache.match(prompt) == min(longest, len(prompt) - 1)
            cache.add(prompt)

    @settings(deadline=None)
    @given(st.text())
    def test_pieces_are_the_text(self, text: str) -> None:
        assert "".join(PieceTokenizer.pieces(text)) == text

    def test_pieces_are_about_as_long_as_a_code_models_tokens(self) -> None:
        assert 2.5 < len(SOURCE) / len(PieceTokenizer()(SOURCE)) < 4.5

    def test_generated_tokens_are_cached(self) -> None:
        assert count_computed(["ab", "abcd"], ["abcx", "abcd"]) == [2, 1]
        assert count_computed(["ab", "abcd"]) == [2, 2]

    def test_psm_computes_the_suffix_each_time_and_spm_what_is_typed(self) -> None:
        rounds = [Round("a", SOURCE + "x" * n, SOURCE, "type") for n in range(3)]
        encode = PromptEncoder(PieceTokenizer())
        suffix = len(PieceTokenizer()(SOURCE))
        psm = prompts.count(rounds, prompts.cut_prompts(rounds, psm_cuts(rounds)), encode)
        spm = prompts.count(rounds, prompts.cut_prompts(rounds, [0, 0, 0]), encode)
        assert psm[1:] == [suffix + 3, suffix + 3]
        assert spm[1:] == [1, 1]
