"""Walks through files: drawn by chance, and asked with each method in the same state."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tiny_checkpoints import write_tiny

from midfill.errors import InvalidRequestError, MidfillError
from midfill_lab.evaluation.jumps import (
    DEFAULT_METHODS,
    Jump,
    JumpOptions,
    JumpReport,
    draw_walks,
    load_walks,
    measure_jumps,
    parse_reuse_methods,
)
from midfill_lab.evaluation.models import ModelChoice
from midfill_lab.evaluation.reuse_session import ReuseSession
from midfill_lab.evaluation.source_files import SourceFile

NOTHING, SOME, NEAR, OTHER = (
    "cacheblend:ratio=0,check_layer=0",
    "cacheblend:ratio=0.5,check_layer=0",
    "cacheblend:ratio=0.5,check_layer=0,order=caret",
    "cacheblend:ratio=0.2,check_layer=0,min_run=5000",
)
OPTIONS = JumpOptions(
    methods=(SOME, NOTHING, NEAR), limit=7, per_file=4, max_tokens=4, shortest=1000, longest=9000
)


def source(name: str, lines: int) -> SourceFile:
    text = "".join(f"{name}_{i} = compute({i * 7919 % 1000}, {name!r})\n" for i in range(lines))
    return SourceFile(f"{name}.py", text)


FILES = [source("alpha", 90), source("beta", 80), source("gamma", 70)]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReuseSession]:
    folder: Path = tmp_path_factory.mktemp("tiny") / "long"
    write_tiny("llama", folder, max_position_embeddings=8192)
    session = ReuseSession(ModelChoice(model=str(folder), threads=1))
    yield session
    session.close()


def measured(
    session: ReuseSession, options: JumpOptions = OPTIONS, earlier: JumpReport | None = None
) -> tuple[JumpReport, list[JumpReport]]:
    """A run's report, and what was saved on the way."""
    saved: list[JumpReport] = []

    def save(report: JumpReport) -> None:
        saved.append(msgspec.structs.replace(report, jumps=list(report.jumps)))

    walks = draw_walks(FILES, options)
    progress: list[int] = []
    report = measure_jumps(
        session, "tiny", walks, options, lambda _, done, __: progress.append(done), save, earlier
    )
    assert progress == sorted(progress)
    return report, saved


@pytest.fixture(scope="module")
def report(session: ReuseSession) -> JumpReport:
    found, saved = measured(session)
    assert [len(one.jumps) for one in saved] == [4, 7], "after each file"
    return found


def test_a_walk_goes_through_one_file_and_to_no_place_twice() -> None:
    walks = draw_walks(FILES, OPTIONS)
    assert [len(walk.holes) - 1 for walk in walks] == [4, 3], "the first one opens the file"
    for walk in walks:
        assert {hole.group for hole in walk.holes} == {walk.group}
        assert len({hole.id for hole in walk.holes}) == len(walk.holes)
    assert draw_walks(FILES, OPTIONS) == walks
    assert draw_walks(FILES, msgspec.structs.replace(OPTIONS, seed=1)) != walks


def test_half_of_the_jumps_stay_near() -> None:
    long = [source(name, 2500) for name in ("delta", "omega", "kappa")]
    options = msgspec.structs.replace(OPTIONS, limit=300, per_file=100)
    jumps = [
        abs(len(one.prefix) - len(other.prefix))
        for walk in draw_walks(long, options)
        for one, other in zip(walk.holes, walk.holes[1:], strict=False)
    ]
    assert 0.4 < sum(jump <= 2000 for jump in jumps) / len(jumps) < 0.75


def test_a_file_must_have_the_right_length(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(FILES[0].text)
    assert {walk.group for walk in load_walks([tmp_path], OPTIONS)} == {f"{tmp_path.name}/a.py"}
    long = msgspec.structs.replace(OPTIONS, shortest=8000)
    with pytest.raises(MidfillError, match="no file has 8,000 to 9,000 characters: see --shortest"):
        load_walks([tmp_path], long)


def test_less_is_computed_where_kv_comes_from_elsewhere(report: JumpReport) -> None:
    found = [jump for jump in report.jumps if jump.answers]
    assert len(found) > len(report.jumps) / 2
    for jump in found:
        nothing, some, near = (jump.answers[name] for name in (NOTHING, SOME, NEAR))
        assert nothing.row_layers < some.row_layers == near.row_layers < jump.exact.row_layers
        assert nothing.reused_tokens > some.reused_tokens == near.reused_tokens > 0
        assert jump.exact.reused_tokens == jump.exact.divergence == 0
        assert jump.exact.same
    assert any(jump.answers[NOTHING].divergence > 0 for jump in found)
    assert all(jump.answer("another") == jump.exact for jump in report.jumps)


def test_methods_leave_the_state_of_the_next_prompt_as_it_was(
    session: ReuseSession, report: JumpReport
) -> None:
    def state(jump: Jump) -> tuple[object, ...]:
        return jump.id, jump.tokens, jump.cached, jump.exact.row_layers, jump.exact.right

    expected = [state(jump) for jump in report.jumps]
    for methods in ((NOTHING,), (OTHER, SOME)):  # one that finds nothing has cached the prompt
        other, _ = measured(session, msgspec.structs.replace(OPTIONS, methods=methods))
        assert [state(jump) for jump in other.jumps] == expected
        for own, jump in zip(other.jumps, report.jumps, strict=True):
            assert OTHER not in own.answers
            for name, answer in own.answers.items():
                assert answer.reused_tokens == jump.answers[name].reused_tokens
                assert answer.divergence == jump.answers[name].divergence


def test_an_interrupted_run_goes_on_where_it_was(session: ReuseSession, report: JumpReport) -> None:
    first = msgspec.structs.replace(report, jumps=report.jumps[:4])
    resumed, saved = measured(session, earlier=first)
    assert len(saved) == 1
    assert resumed.jumps[:4] == report.jumps[:4]
    assert [jump.id for jump in resumed.jumps] == [jump.id for jump in report.jumps]
    other = msgspec.structs.replace(OPTIONS, seed=1)
    with pytest.raises(MidfillError, match="can't be resumed: its options differ"):
        measured(session, other, earlier=first)
    jump = msgspec.structs.replace(report.jumps[0], digest="0")
    with pytest.raises(MidfillError, match="can't be resumed: its jumps are in other files"):
        measured(session, earlier=msgspec.structs.replace(report, jumps=[jump]))


def test_methods_are_those_of_reuse() -> None:
    assert len(parse_reuse_methods(DEFAULT_METHODS)) == 7
    assert parse_reuse_methods(f"{SOME}  {NEAR} {SOME}") == (SOME, NEAR)
    with pytest.raises(InvalidRequestError, match="cake takes no KV from elsewhere, as cacheblend"):
        parse_reuse_methods("cake")
    with pytest.raises(MidfillError, match="--methods names nothing"):
        parse_reuse_methods(" ")
