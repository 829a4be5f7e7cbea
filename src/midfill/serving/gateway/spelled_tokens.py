"""Special tokens that are spelled out in user text, where a server would parse them.

A server that is sent text looks for its special tokens in it, and can't know which of them a user
has written. Text that spells one is therefore cut inside it, and its parts are tokenised apart; or,
where the server can't do that, gets an invisible character there.
"""

import re
from itertools import pairwise

from midfill.infill.formats import FAMILIES
from midfill.models.tokens.tokenizer import END_TOKENS

WORD_JOINER = "\u2060"
"""Shows as nothing and joins what it stands between."""

_COMMON = (
    "<s>", "</s>", "<unk>", "<pad>", "<bos>", "<eos>", "<mask>", "[INST]", "[/INST]", "<<SYS>>",
    "<</SYS>>", "<start_of_turn>", "<end_of_turn>", "<think>", "</think>", "<tool_call>",
    "</tool_call>", "[MIDDLE]", "<fim_pad>", "<fim-pad>", "<filename>", "<gh_stars>",
    "<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>",
    "<jupyter_code>", "<jupyter_output>", "<jupyter_script>", "<empty_output>", "<commit_before>",
    "<commit_msg>", "<commit_after>",
)  # fmt: skip
_CONTROL = r"<\|[^|<>\s]{1,64}\|>|<｜[^｜<>\s]{1,64}｜>"  # noqa: RUF001 (DeepSeek's own spelling)


def family_tokens() -> tuple[str, ...]:
    """Return the tokens of all FIM formats that are known, each once."""
    named: dict[str, None] = {}
    for family in FAMILIES:
        tokens = (family.prefix, family.suffix, family.middle, *family.stop)
        for text in (*tokens, family.repository, family.file_separator):
            if text is not None:
                named[text] = None
    return tuple(named)


class SpelledTokens:
    """Finds special tokens in user text.

    Args:
        further: tokens to look for beside all that are known, such as those that a user names.
    """

    def __init__(self, further: tuple[str, ...] = ()) -> None:
        texts = {*family_tokens(), *END_TOKENS, *_COMMON, *further}
        texts |= {text.removeprefix("▁") for text in texts}
        longest_first = sorted(texts, key=len, reverse=True)
        self._pattern = re.compile("|".join([*map(re.escape, longest_first), _CONTROL]))

    def split(self, text: str) -> list[str]:
        """Return the text in parts, none of which spells a special token."""
        cuts = [0, *(match.start() + 1 for match in self._pattern.finditer(text)), len(text)]
        return [text[start:end] for start, end in pairwise(cuts) if start < end]

    def escape(self, text: str) -> str:
        """Return the text with a word joiner inside each special token that it spells."""
        return WORD_JOINER.join(self.split(text))
