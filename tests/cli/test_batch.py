"""What ``midfill batch`` says of its progress."""

import pytest

from midfill.cli.batch import duration, progress_note, summary
from midfill.serving.server.batch.job import BatchProgress


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (89, "89 s"), (95, "2 min"), (3600, "60 min"), (12_000, "3 h 20 min")],
)
def test_times_in_words(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_progress_in_words() -> None:
    begun = BatchProgress("planning", rows=10, done=0, failed=0)
    assert progress_note(begun) == "0 of 10 rows"
    amid = BatchProgress(
        "answering", rows=10, done=4, failed=1, prompt_tokens=9000, output_tokens=1000,
        seconds=2.0, seconds_left=100.0,
    )  # fmt: skip
    assert progress_note(amid) == "4 of 10 rows, 1 error, 5,000 tokens/s, 2 min left"


def test_the_summary_in_words() -> None:
    assert summary(BatchProgress("answering", rows=3, done=3, failed=0)) == (
        "3 of 3 rows have a result"
    )
    done = BatchProgress(
        "answering", rows=10, done=10, failed=2, prompt_tokens=9000, cached_tokens=4500,
        output_tokens=1000, seconds=2.0, seconds_left=0.0,
    )  # fmt: skip
    assert summary(done) == (
        "10 of 10 rows have a result, 2 of them errors, 9,000 prompt tokens (50% of them shared),"
        " 1,000 generated, 5,000 tokens/s in 2 s"
    )
