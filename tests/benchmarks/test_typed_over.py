"""Each answer is measured with what the last one predicts, and without, and is the same."""

import pytest
from tiny_checkpoints import write_tiny

from benchmarks.typed_over import TYPED, TypedOverReport, measure_typed_over, typed_over_table

HOLES = 6


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> TypedOverReport:
    folder = write_tiny("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=16_384)
    return measure_typed_over(str(folder), holes=HOLES, threads=1)


def test_every_hole_is_typed_over(report: TypedOverReport) -> None:
    assert report.holes == HOLES
    assert [each.typed for each in report.outcomes] == list(TYPED)
    for each in report.outcomes:
        columns = (each.same, each.tokens, each.seconds, each.plain_seconds)
        assert [len(column) for column in columns] == [HOLES] * 4
        assert min(*each.steps, *each.plain_steps) >= 1
    assert all(report.outcomes[0].same)


def test_the_table_has_a_row_per_number_of_typed_characters(report: TypedOverReport) -> None:
    table = typed_over_table(report)
    assert [row["typed"] for row in table.rows] == [str(count) for count in TYPED]
    assert table.rows[0]["the rest again"] == "100%"
