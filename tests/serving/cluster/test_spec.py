"""Arguments of midfill's applications on Ray."""

from types import SimpleNamespace

import msgspec
import pytest

from midfill.config import ModelOptions
from midfill.errors import MidfillError
from midfill.serving.cluster.spec import EnginesSpec, FrontSpec, ModelSpec, by_queue, read_spec
from midfill.serving.options import WindowSize


def test_a_spec_survives_being_written_to_a_config_file() -> None:
    spec = EnginesSpec(
        model=ModelSpec(model="m", window=WindowSize(100, 20), options=ModelOptions(threads=2)),
        replicas=2,
        max_replicas=4,
    )
    plain = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(spec)))
    assert read_spec(plain, EnginesSpec) == spec


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model": {"model": "m"}, "replica": 2}, "replica"),
        ({"model": {"model": "m"}, "replicas": 0}, "at least 1"),
        ({"model": {"model": "m"}, "replicas": 3, "max_replicas": 2}, "max_replicas 2"),
        ({"model": {"model": "m"}, "router": "random"}, "random"),
        ({"model": {}}, "model"),
    ],
)
def test_a_wrong_argument_is_named(values: dict[str, object], named: str) -> None:
    with pytest.raises(MidfillError, match=named):
        read_spec(values, EnginesSpec)


def test_the_servers_arguments_are_checked_too() -> None:
    with pytest.raises(MidfillError, match="api_keys"):
        read_spec({"api_keys": "secret"}, FrontSpec)


def test_a_model_is_looked_for_where_it_runs() -> None:
    with pytest.raises(MidfillError, match="no-such-model"):
        ModelSpec(model="/no-such-model").find()


@pytest.mark.parametrize(
    ("requests", "queued", "replicas"),
    [([4, 4], 0, 2), ([8, 8], 0, 4), ([0, 0], 0, 0), ([4], 4, 2)],
)
def test_replicas_follow_the_engines_queues(
    requests: list[float], queued: float, replicas: float
) -> None:
    context = SimpleNamespace(
        aggregated_metrics={"requests": dict(enumerate(requests))},
        total_queued_requests=queued,
        config=SimpleNamespace(target_ongoing_requests=4.0),
    )
    assert by_queue(context) == (replicas, {})
