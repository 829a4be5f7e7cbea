"""An example as text for people: sentinels by name, fragments' borders visible, the answer marked.

What is only read is plain, what is learned green, and what a model could not know dim.
"""

from rich.text import Text

from midfill.tokens.tokenizer import Tokenizer
from midfill.training.examples import Example

BORDER = "│"
_SENTINEL, _LEARNED, _UNKNOWABLE, _CUT = "bold cyan", "green", "dim", "bold red"


def example_text(example: Example, tokenizer: Tokenizer) -> Text:
    """The tokens of an example in a row; a border stands where a fragment begins."""
    text = Text()
    pending, pending_style = b"", ""
    answer = 1 + max(
        at for at, each in enumerate(example.ids[:-1]) if not tokenizer.token_bytes(int(each))
    )

    def put(style: str = "") -> None:
        nonlocal pending, pending_style
        text.append(pending.decode("utf-8", "replace"), pending_style)
        pending, pending_style = b"", style

    for at, token_id in enumerate(map(int, example.ids)):
        if at in example.borders:
            put()
            text.append(BORDER, _CUT)
        stands_for = tokenizer.token_bytes(token_id)
        style = "" if at < answer else _LEARNED if example.weights[at] else _UNKNOWABLE
        if not stands_for:
            put()
            text.append(tokenizer.token_text(token_id), _SENTINEL)
        elif style != pending_style:
            put(style)
        pending += stands_for
    put()
    return text
