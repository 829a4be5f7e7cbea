"""How often a server of the language server's own is tried."""

from midfill.lsp.server_access import pause_after


def test_pauses_between_attempts_grow_up_to_a_limit() -> None:
    assert [pause_after(failures) for failures in (1, 2, 3, 9)] == [5, 10, 20, 300]
