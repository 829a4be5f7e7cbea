"""python -m benchmarks training-corpus: what the default model's adapter is trained on."""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_CHARACTERS = 310_000_000


def training_corpus(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="Folder with lists of packages.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the packages and the corpus.")
    ],
    characters: Annotated[
        int, typer.Option(min=1, help="Characters of the corpus.")
    ] = DEFAULT_CHARACTERS,
) -> None:
    """Fetch the packages that a recipe names, and select a corpus of their files.

    The same command continues where it was interrupted. Beside corpus.jsonl it writes
    statistics.txt: languages, licences, and how many files were refused why.
    """
    from benchmarks.training.training_corpus import CORPUS, read_package_lists, write_corpus
    from midfill.cli.progress import show_progress

    lists = read_package_lists(recipe)
    with show_progress() as progress:
        statistics = write_corpus(lists, output, characters, progress)
    typer.echo(
        f"{output / CORPUS}: {sum(statistics.documents.values()):,} documents,"
        f" {sum(statistics.characters.values()):,} characters"
    )
