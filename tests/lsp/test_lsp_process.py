"""``midfill lsp`` with clients that differ, with other settings, and with servers that fail."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from lsp_editor import INLINE, connected, insertion
from lsprotocol import types
from processes import bound_socket
from running_server import RunningServer

pytestmark = pytest.mark.asyncio

TEXT = "x = 1 + "
SHORT = ("-n", "8", "--debounce-ms", "0", "--min-confidence", "0")
UTF = types.PositionEncodingKind


async def test_a_document_whose_change_cant_be_read_has_no_completions(
    server: RunningServer,
) -> None:
    async with connected("--url", server.url, *SHORT) as editor:
        uri = editor.open(TEXT)
        assert await editor.ask(uri, 0, 8)
        change = {"textDocument": {"uri": uri}, "contentChanges": [{"text": 3}]}
        editor.send("textDocument/didChange", change)
        assert await editor.ask(uri, 0, 8) is None


@pytest.mark.parametrize(
    ("encodings", "agreed", "column"),
    [
        (None, UTF.Utf16, 6),
        ([UTF.Utf8, UTF.Utf16], UTF.Utf8, 10),
        ([UTF.Utf32], UTF.Utf32, 5),
    ],
)
async def test_position_encodings_are_agreed_on(
    server: RunningServer,
    encodings: list[types.PositionEncodingKind] | None,
    agreed: types.PositionEncodingKind,
    column: int,
) -> None:
    async with connected("--url", server.url, *SHORT, encodings=encodings) as editor:
        assert editor.result.capabilities.position_encoding == agreed
        uri = editor.open("#𝄞字 x\n")
        editor.change(uri, insertion(0, column, "y"))
        (item,) = await editor.ask(uri, 0, column + 1) or ()
        assert str(item.insert_text).startswith("xy")
        assert item.range is not None
        assert (item.range.start.character, item.range.end.character) == (column - 1, column + 1)


async def test_editors_without_inline_completion_get_a_menu(server: RunningServer) -> None:
    async with connected("--url", server.url, *SHORT, text_document=None) as editor:
        assert editor.result.capabilities.completion_provider is not None
        uri = editor.open(TEXT + "va")
        menu = await editor.menu(uri, 0, 10)
        assert menu.is_incomplete
        (item,) = menu.items
        assert isinstance(item.text_edit, types.TextEdit)
        assert item.text_edit.new_text.startswith("va")
        assert item.text_edit.new_text == item.filter_text
        assert not (await editor.menu("file:///nowhere.py", 0, 0)).items


@pytest.mark.parametrize(("menu", "offered"), [("auto", False), ("always", True)])
async def test_editors_with_inline_completion_get_a_menu_if_they_want_it(
    menu: str, offered: bool
) -> None:
    async with connected(settings={"menu": menu}, text_document=INLINE) as editor:
        capabilities = editor.result.capabilities
        assert (capabilities.completion_provider is not None) == offered
        assert capabilities.inline_completion_provider is not None


async def test_settings_are_fetched_from_the_client_and_checked(server: RunningServer) -> None:
    configuration: dict[str, object] = {
        "url": server.url, "maxTokens": 1, "lines": "none", "minConfidence": 0
    }  # fmt: skip
    async with connected("--url", "http://127.0.0.1:9", configuration=configuration) as editor:
        uri = editor.open(TEXT)
        await editor.ask(uri, 0, 8)  # waits until they are there
        assert (await editor.counts())["failed"] == 0
        (message,) = editor.messages
        assert message == "midfill: a setting is ignored: lines: expected one of single, block"
        short = await editor.ask(uri, 0, 8)
        editor.client.set_configuration(
            {"url": server.url, "maxTokens": 8, "minConfidence": 0}, section="midfill"
        )
        editor.client.workspace_did_change_configuration(
            types.DidChangeConfigurationParams(settings=None)
        )
        while await editor.ask(uri, 0, 8) == short:  # until the settings are there
            await asyncio.sleep(0.01)
        assert len(editor.messages) == 1


async def test_what_is_wrong_with_settings_is_told_once_until_it_is_mended() -> None:
    wrong: dict[str, object] = {"maxTokens": 0}
    async with connected(settings=wrong, configuration=wrong) as editor:
        for _ in range(3):
            editor.configure(**wrong)
            await editor.counts()
        assert len(editor.messages) == 1
        editor.configure(maxTokens=1)
        editor.configure(**wrong)
        await editor.message_count(2)


async def test_a_server_that_is_down_is_told_once_until_it_is_back(server: RunningServer) -> None:
    with contextlib.closing(Door(server.url)) as door:
        await check_a_server_is_told_of_once_until_it_is_back(door)


async def check_a_server_is_told_of_once_until_it_is_back(door: "Door") -> None:
    async with connected("--url", door.url, *SHORT) as editor:
        uri = editor.open(TEXT)
        for _ in range(3):
            assert await editor.ask(uri, 0, 8) == []
        (message,) = editor.messages
        assert message.startswith(f"midfill: no server answers at {door.url} (")
        assert message.endswith("; start one with: midfill serve")
        async with door.opened():
            assert await editor.ask(uri, 0, 8)
        editor.change(uri, insertion(0, 8, "2 + "))
        for _ in range(2):
            assert await editor.ask(uri, 0, 12) == []
        assert len(editor.messages) == 2


async def test_what_is_no_server_of_completions_is_told_once(server: RunningServer) -> None:
    async with connected("--url", server.url + "/elsewhere") as editor:
        uri = editor.open(TEXT)
        for _ in range(2):
            assert await editor.ask(uri, 0, 8) == []
        (message,) = editor.messages
        assert "404" in message


class Door:
    """Leads to a server of this machine while it is open; nobody answers there otherwise.

    Attributes:
        url: where.
    """

    def __init__(self, url: str) -> None:
        self._behind = int(url.rpartition(":")[2])
        self._socket = bound_socket()
        self._port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        tasks = set()

        async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.add(asyncio.current_task())
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._behind)
            with contextlib.closing(writer), contextlib.closing(inner_writer):
                await asyncio.gather(pass_on(reader, inner_writer), pass_on(inner_reader, writer))

        async with await asyncio.start_server(enter, sock=self._socket) as opened:
            yield
            opened.close()
            self._socket = bound_socket(self._port)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
