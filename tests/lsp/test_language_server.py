"""``midfill lsp`` as an editor sees it: a real process in front of a real server."""

import asyncio
import re
from collections.abc import Callable

import pytest
from lsp_editor import INVOKED, Editor, insertion, position
from lsprotocol import types
from pygls.exceptions import JsonRpcException
from running_server import RunningServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "def area(width, height):\n    return wid\n\n\nprint(area(2, 3))\n"


def expected(server: RunningServer, prefix: str, suffix: str, lines: str = "block") -> str:
    """What the server completes between two texts."""
    answer = server.complete(
        prompt=prefix, suffix=suffix, max_tokens=8, temperature=0, midfill={"lines": lines}
    )
    text: str = answer["choices"][0]["text"]
    return text


async def test_a_completion_is_the_servers_and_begins_with_the_text_before_the_caret(
    editor: Editor, server: RunningServer
) -> None:
    prefix, suffix = TEXT.split("\n\n\n")
    text = expected(server, prefix, "\n\n\n" + suffix)
    assert text.strip()
    items = await editor.ask(editor.open(TEXT), 1, 14)
    assert items is not None
    (item,) = items
    assert item.insert_text == item.filter_text == "wid" + text.rstrip()
    assert item.range == types.Range(position(1, 11), position(1, 14))


async def test_completions_follow_edits(editor: Editor, server: RunningServer) -> None:
    uri = editor.open("# 𝄞 é\r\nx = 1\r\n")
    editor.change(uri, insertion(0, 4, "𝄞\n"), insertion(2, 5, "0"))
    editor.change(uri, insertion(2, 6, " + "))
    items = await editor.ask(uri, 2, 9)
    # The model is shown plain line feeds.
    text = expected(server, "# 𝄞𝄞\n é\nx = 10 + ", "\n")
    assert items is not None
    assert [item.insert_text for item in items] == [text.rstrip()] * bool(text.strip())


async def test_a_line_that_goes_on_after_the_caret_is_completed_alone(
    editor: Editor, server: RunningServer
) -> None:
    items = await editor.ask(editor.open("print(, 1)\nx\n"), 0, 6)
    text = expected(server, "print(", ", 1)\nx\n", lines="single")
    assert items is not None
    assert [item.insert_text for item in items] == ["print(" + text] * bool(text.strip())


@pytest.mark.parametrize(("line", "column"), [(0, 99), (9, 0), (2**31 - 1, 2**31 - 1)])
async def test_a_position_out_of_range_means_the_nearest_end(
    editor: Editor, line: int, column: int
) -> None:
    uri = editor.open("x = 1 + ")
    assert await editor.ask(uri, line, column) == await editor.ask(uri, 0, 8)


async def test_several_completions_only_when_the_user_asks(editor: Editor) -> None:
    uri = editor.open(TEXT)
    automatic, invoked = await editor.ask(uri, 1, 14), await editor.ask(uri, 1, 14, INVOKED)
    assert automatic is not None
    assert invoked is not None
    assert len(automatic) == 1
    assert 1 < len(invoked) <= 3
    assert invoked[0].insert_text == automatic[0].insert_text
    assert len({item.insert_text for item in invoked}) == len(invoked)


async def test_requests_and_changes_are_ordered_as_they_arrive(editor: Editor) -> None:
    uri, other = editor.open("x"), editor.open(TEXT)
    asked = []
    with editor.unread():
        elsewhere = asyncio.create_task(editor.ask(other, 1, 14))
        for column in range(1, 6):
            asked.append(asyncio.create_task(editor.ask(uri, 0, column)))
            await asyncio.sleep(0)
            editor.change(uri, insertion(0, column, "y"))
        last = asyncio.create_task(editor.ask(uri, 0, 6))
        await asyncio.sleep(0)
    assert await asyncio.gather(*asked) == [None] * 5
    items = await last
    assert items is not None
    assert all(str(item.insert_text).startswith("xyyyyy") for item in items)
    assert await elsewhere


async def test_a_newer_request_takes_the_place_of_an_older_one(editor: Editor) -> None:
    uri = editor.open(TEXT)
    with editor.unread():
        first = asyncio.create_task(editor.ask(uri, 1, 13))
        await asyncio.sleep(0)
        second = asyncio.create_task(editor.ask(uri, 1, 14))
        await asyncio.sleep(0)
    assert await second
    assert await first is None


async def test_a_completion_is_continued_while_it_is_typed(editor: Editor) -> None:
    uri = editor.open(TEXT)
    items = await editor.ask(uri, 1, 14)
    assert items
    whole = str(items[0].insert_text)
    assert len(whole) >= 6, "the tiny model's completion is too short for this test"
    before = await editor.counts()
    for index in range(3, 5):
        editor.change(uri, insertion(1, 11 + index, whole[index]))
        (item,) = await editor.ask(uri, 1, 12 + index) or ()
        assert str(item.insert_text).endswith(whole[index + 1 :])
        assert item.command == items[0].command
    after = await editor.counts()
    assert after["continued"] - before["continued"] == 2
    assert after["promptTokens"] == before["promptTokens"]


async def test_a_later_keystroke_finds_its_prompt_in_the_cache(editor: Editor) -> None:
    uri = editor.open(TEXT)
    await editor.ask(uri, 1, 14)
    editor.change(uri, insertion(1, 14, "~"))
    await editor.ask(uri, 1, 15)
    counts = await editor.counts()
    assert counts["lastCachedTokens"] >= counts["lastPromptTokens"] - 3


async def test_where_the_user_starts_to_type_the_prompt_is_computed_before_the_editor_asks(
    editor: Editor, server: RunningServer
) -> None:
    uri = editor.open("".join(f"value_{number} = {number}\n" for number in range(40)))
    assert await editor.ask(uri, 2, 11) is not None
    before = server.metric("computed_tokens_total")
    editor.change(uri, insertion(30, 13, "0"))
    await asyncio.to_thread(
        server.wait_for, lambda: server.metric("computed_tokens_total") > before + 100
    )
    assert await editor.ask(uri, 30, 14) is not None
    counts = await editor.counts()
    assert counts["lastPromptTokens"] - counts["lastCachedTokens"] <= 2


async def test_a_cancelled_request_is_answered_so(editor: Editor) -> None:
    uri = editor.open(TEXT)
    with editor.unread():
        request = asyncio.create_task(editor.ask(uri, 1, 14, message_id="cancelled"))
        await asyncio.sleep(0)
        editor.cancel("cancelled")
    with pytest.raises(JsonRpcException) as error:
        await request
    assert error.value.code == types.LSPErrorCodes.RequestCancelled
    assert await editor.ask(uri, 1, 14)


async def test_a_change_ends_generation_in_the_server(
    editor: Editor, server: RunningServer
) -> None:
    def aborted() -> int:
        labels = 'finished_reason="abort"[^}]*'
        counts = re.findall(
            rf"^midfill:request_success_total{{[^}}]*{labels}}} (\S+)$",
            server.get("/metrics").text,
            re.MULTILINE,
        )
        return sum(int(float(count)) for count in counts)

    async def wait_for(condition: Callable[[], bool]) -> None:
        await asyncio.to_thread(server.wait_for, condition)

    uri = editor.open("# a\n" * 5)
    await wait_for(server.is_idle)
    before = aborted()
    editor.configure(url=server.url, maxTokens=400, debounceMs=0, minConfidence=0)
    try:
        request = asyncio.create_task(editor.ask(uri, 5, 0))
        await wait_for(lambda: server.metric("num_requests_running") == 1)
        editor.change(uri, insertion(0, 0, "#"))
        assert await request is None
        await wait_for(lambda: aborted() == before + 1)
        await wait_for(server.is_idle)
    finally:
        editor.configure(url=server.url, maxTokens=8, debounceMs=0, minConfidence=0)


async def test_acceptance_is_counted(editor: Editor) -> None:
    uri = editor.open(TEXT)
    before = await editor.counts()
    items = await editor.ask(uri, 1, 14)
    assert items
    (item,) = items
    length = len(str(item.insert_text)) - len("wid")
    notify = editor.client.protocol.notify
    notify("textDocument/didShowCompletion", {"item": {"command": command_of(item)}})
    accepted = {"item": {"command": command_of(item)}, "acceptedLength": len("wid") + 1}
    notify("textDocument/didPartiallyAcceptCompletion", accepted)
    partly = await editor.counts()
    assert item.command is not None
    await editor.execute(item.command)
    await editor.execute(item.command)
    after = await editor.counts()
    changes = {name: after[name] - before[name] for name in ("shown", "accepted", "completions")}
    assert changes == {"shown": 1, "accepted": 1, "completions": 1}
    assert partly["acceptedCharacters"] - before["acceptedCharacters"] == 1
    assert after["acceptedCharacters"] - before["acceptedCharacters"] == length


def command_of(item: types.InlineCompletionItem) -> dict[str, object]:
    assert item.command is not None
    return {"command": item.command.command, "arguments": item.command.arguments}


async def test_a_document_that_is_not_open_has_no_completions(editor: Editor) -> None:
    assert await editor.ask("file:///nowhere.py", 0, 0) is None
    editor.change("file:///nowhere.py", insertion(0, 0, "x"))
    uri = editor.open(TEXT)
    editor.close(uri)
    assert await editor.ask(uri, 1, 14) is None
    assert editor.messages == []
