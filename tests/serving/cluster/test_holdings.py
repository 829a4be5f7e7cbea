"""What a server remembers of the prompts that its replicas have computed."""

from midfill.serving.cluster.holdings import Holdings

BOTH = ("a", "b")


def test_a_replica_holds_what_two_prompts_begin_with_alike() -> None:
    holdings = Holdings()
    holdings.record("d", "a", [1, 2, 3, 4])
    holdings.record("d", "b", [1, 9])
    assert holdings.held("d", [1, 2, 3, 7, 7], BOTH) == {"a": 3, "b": 1}
    assert holdings.held("other", [1, 2, 3], BOTH) == {}


def test_a_prompt_computed_in_idle_time_does_not_hide_the_last_one() -> None:
    holdings = Holdings()
    holdings.record("d", "a", [1, 2, 3, 4])
    holdings.record("d", "a", [1, 8])
    assert holdings.held("d", [1, 2, 3], BOTH) == {"a": 3}
    assert holdings.held("d", [1, 8, 9], BOTH) == {"a": 2}
    holdings.record("d", "a", [5])
    assert holdings.held("d", [1, 2, 3], BOTH) == {"a": 1}  # the oldest is forgotten


def test_replicas_that_have_gone_are_forgotten() -> None:
    holdings = Holdings()
    holdings.record("d", "a", [1, 2])
    holdings.record("d", "b", [1, 2])
    assert holdings.held("d", [1, 2], ["b"]) == {"b": 2}
    assert holdings.held("d", [1, 2], BOTH) == {"b": 2}
    holdings.forget("d", "b")
    assert holdings.held("d", [1, 2], BOTH) == {}


def test_documents_at_rest_are_forgotten_first() -> None:
    holdings = Holdings(max_tokens=5)
    for name in ("first", "second"):
        holdings.record(name, "a", [1, 2])
    holdings.record("first", "a", [1, 2])  # six tokens
    assert holdings.held("second", [1, 2], BOTH) == {}
    assert holdings.held("first", [1, 2], BOTH) == {"a": 2}
    holdings.record("long", "a", [1] * 9)
    assert holdings.held("long", [1], BOTH) == {}
