"""The bounds of the other files that a prompt shows."""

import itertools
from pathlib import Path

from midfill.frontend.context_bounds import context_bounds
from midfill.frontend.prompts import PromptEncoder, fim_format
from midfill.infill.context_files import ContextFile, context_segments
from midfill.infill.formats import FimFormat, Sentinel
from midfill.infill.layout import PromptLayout, TextSegment, lay_out
from midfill.infill.request import InfillRequest
from midfill.models.checkpoints.opening import open_checkpoint


def test_a_file_begins_after_one_separator_and_ends_with_the_next() -> None:
    pre, suf, mid, repository, separator = (
        Sentinel(name, number) for number, name in enumerate("PSMRF")
    )
    format = FimFormat("made up", pre, suf, mid, repository=repository, file_separator=separator)
    files = [ContextFile("A = 1\n", "a.py"), ContextFile("B = 2\n", "b.py")]
    context = context_segments(format, files, path="d.py", repository="here")
    segments, name = lay_out(format, "p = ", "\n", 0, context=context)
    layout = PromptLayout(segments=segments, layout=name, context=context)
    assert [one.text for one in segments[:8]] == [
        "R", "here\n", "F", "a.py\nA = 1\n", "F", "b.py\nB = 2\n", "F", "d.py\n",
    ]  # fmt: skip
    counts = [0, *(10 if isinstance(one, TextSegment) else 1 for one in segments)]
    parts = [[7] * count for count in counts]

    def nothing(text: str, files: tuple[int, ...], ids: tuple[int, ...]) -> tuple[int, ...]:
        return ()

    assert context_bounds(layout, parts, format, nothing) == (12, 23, 34)


def test_files_without_separators_are_found_by_their_texts(
    tiny_folder: Path,
) -> None:
    checkpoint = open_checkpoint(tiny_folder)
    prompts = PromptEncoder(checkpoint, fim_format(checkpoint), 100)
    files = (ContextFile("A = 'ä'\n", "a.py"), ContextFile("B = 2\n", "b.py"))
    prompt = prompts.infill(InfillRequest(prefix="p", suffix="q", context=files, path="d.py"))
    decode = checkpoint.tokenizer.decode
    texts = [decode(prompt.token_ids[a:b]) for a, b in itertools.pairwise(prompt.contexts)]
    assert texts == ["# a.py\nA = 'ä'\n", "# b.py\nB = 2\n"]
    assert prompt.contexts[0] == 1  # after PRE
    assert decode(prompt.token_ids[prompt.contexts[-1] :]).startswith("# d.py\n")
    assert prompts.infill(InfillRequest(prefix="p", suffix="q")).contexts == ()
