"""Each kind of trouble is shown once until it is over."""

from midfill.lsp.language_server import LoadingMessages, Notices
from midfill.lsp.suggestions import RequestRefusedError, ServerBusyError, ServerUnreachableError
from midfill.system.progress import Stage


def test_a_trouble_is_shown_once_until_it_is_over() -> None:
    notices = Notices()
    told = [notices.arises(ServerUnreachableError(reason)) for reason in ("refused", "timeout")]
    assert told == [True, False]
    assert notices.over()
    assert not notices.over()
    assert notices.arises(ServerUnreachableError("refused"))


def test_another_kind_of_trouble_is_shown_as_well() -> None:
    notices = Notices()
    assert notices.arises(ServerUnreachableError("refused"))
    assert notices.arises(RequestRefusedError("no key"))


def test_a_busy_server_is_no_trouble_to_tell_of() -> None:
    notices = Notices()
    assert not notices.arises(ServerBusyError("loading"))
    assert not notices.over()


def test_a_load_that_takes_long_is_told_of_stage_by_stage() -> None:
    shown: list[str] = []
    messages = LoadingMessages("loading", shown.append)
    messages.stage(Stage("downloading", 10))
    assert shown == []
    messages.begin()
    messages.stage(Stage("downloading", 20))
    messages.stage(Stage("compiling kernels"))
    assert [text.partition(";")[0] for text in shown] == [
        "loading (downloading: 10%)",
        "loading (compiling kernels)",
    ]
