"""Each kind of trouble is shown once until it is over."""

from midfill.lsp.language_server import Notices
from midfill.lsp.suggestions import RequestRefusedError, ServerBusyError, ServerUnreachableError


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
