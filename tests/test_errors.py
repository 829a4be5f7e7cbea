"""Errors: what the field of an InvalidRequestError is called."""

from midfill.errors import InvalidRequestError


def test_a_field_takes_the_name_that_the_client_used() -> None:
    error = InvalidRequestError.of_field("context", "has 9 files in context", code="too_many")
    renamed = error.renamed({"context": "input_extra", "path": "midfill.path"})
    assert str(renamed) == "input_extra has 9 files in context"
    assert (renamed.param, renamed.code) == ("input_extra", "too_many")


def test_a_field_without_another_name_keeps_its_own() -> None:
    for error in (
        InvalidRequestError.of_field("prompt", "is empty"),
        InvalidRequestError("the body is nested too deeply"),
        InvalidRequestError("a path, or what looks like one", param="path"),
    ):
        assert error.renamed({"path": "midfill.path"}) is error
