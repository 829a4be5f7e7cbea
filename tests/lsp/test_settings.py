"""Settings as clients send them."""

import pytest

from midfill.lsp.settings import Settings

DEFAULTS = Settings()


@pytest.mark.parametrize(
    "given", [{"maxTokens": 9, "lines": "single"}, {"midfill": {"maxTokens": 9, "lines": "single"}}]
)
def test_settings_may_stand_in_a_section(given: object) -> None:
    settings, problems = DEFAULTS.updated(given)
    assert problems == []
    assert settings == Settings(max_tokens=9, lines="single")


def test_what_is_not_given_stays() -> None:
    settings, _ = Settings(max_tokens=9, url="http://h:1").updated(
        {"maxTokens": None, "model": "m"}
    )
    assert settings == Settings(max_tokens=9, url="http://h:1", model="m")


@pytest.mark.parametrize("given", [None, {}, {"trace": {"server": "off"}}, {"midfill": None}])
def test_unknown_settings_are_ignored(given: object) -> None:
    assert DEFAULTS.updated(given) == (DEFAULTS, [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("maxTokens", "many"),
        ("maxTokens", 0),
        ("maxTokens", 2**70),
        ("debounceMs", -1),
        ("debounceMs", 0.5),
        ("lines", "all"),
        ("start", "yes"),
        ("url", "127.0.0.1:8080"),
        ("url", "http://"),
        ("url", "http://host:port"),
        ("url", 8080),
        ("apiKey", "geheimnis-ß"),
        ("apiKey", "two\nlines"),
        ("menu", []),
    ],
)
def test_a_bad_value_is_named_and_the_others_count(name: str, value: object) -> None:
    settings, problems = DEFAULTS.updated({name: value, "alternatives": 2})
    assert settings == Settings(alternatives=2)
    (problem,) = problems
    assert problem.startswith(f"{name}: ")
    assert "\n" not in problem
    assert "expected" in problem
    assert "geheimnis" not in problem


@pytest.mark.parametrize("given", ["fast", 3, [1], {"midfill": "fast"}])
def test_settings_of_another_shape_change_nothing(given: object) -> None:
    settings, problems = DEFAULTS.updated(given)
    assert settings == DEFAULTS
    assert len(problems) <= 1


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_url_may_end_with_the_apis_path(url: str) -> None:
    settings, _ = DEFAULTS.updated({"url": url})
    assert settings.url == "http://h:1"


def test_which_settings_lead_to_another_server() -> None:
    assert Settings(url="http://h:1").access != DEFAULTS.access
    assert Settings(model="m").access != DEFAULTS.access
    assert Settings(max_tokens=3).access == DEFAULTS.access


def test_a_key_is_sent_to_its_own_server_only() -> None:
    settings, _ = DEFAULTS.updated({"url": "http://team", "apiKey": "k"})
    assert settings.sent_key == "k"
    for given in ({"url": "http://evil"}, {"url": "http://evil", "apiKey": "k"}):
        other, problems = settings.updated(given)
        assert other.sent_key is None
        assert other.access != settings.access
        assert problems[0].startswith("apiKey: the key is for http://team")
        assert other.updated({"url": "http://team"})[0].sent_key == "k"
    assert settings.updated({"url": "http://b", "apiKey": "its own"})[0].sent_key == "its own"
    assert settings.updated({"apiKey": "newer"})[0].sent_key == "newer"


def test_no_setting_says_whose_key_it_is() -> None:
    settings, _ = DEFAULTS.updated({"apiKey": "k"})
    other, _ = settings.updated({"url": "http://evil", "keyUrl": "http://evil"})
    assert other.sent_key is None
