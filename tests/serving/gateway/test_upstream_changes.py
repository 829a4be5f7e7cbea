"""Servers that come and go behind a gateway."""

import asyncio
from pathlib import Path

from gateway_serving import Served, run, serve
from stub_upstream import StubModel, StubUpstream


async def ask(gateway: Served, document: int) -> None:
    """Ask for a completion in a named document."""
    named = {"midfill": {"document": f"{document}"}}
    await gateway.complete(prompt=f"a{document} =", suffix="\n", **named)


def test_documents_stick_to_their_server() -> None:
    async def test() -> None:
        with StubUpstream() as one, StubUpstream() as other:
            async with serve(one.url, other.url) as gateway:
                for _ in range(3):
                    for document in range(10):
                        await ask(gateway, document)
            homes = [{each.prompt for each in server.received} for server in (one, other)]
            assert not homes[0] & homes[1]
            assert len(homes[0] | homes[1]) == 10

    run(test())


def test_a_file_of_servers_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "servers.txt"

    async def test() -> None:
        with StubUpstream() as one, StubUpstream() as other:
            file.write_text(f"# the first\n{one.url}/v1/\n")
            async with serve(upstream_file=file) as gateway:
                await ask(gateway, 0)
                file.write_text(f"{other.url}\n")
                await gateway.gateway.reload()
                await ask(gateway, 0)
                assert (len(one.received), len(other.received)) == (1, 1)
                file.write_text("nonsense\n")
                await gateway.gateway.reload()
                await ask(gateway, 0)
                assert len(other.received) == 2

    run(test())


def test_a_server_that_leaves_finishes_what_it_has_begun(tmp_path: Path) -> None:
    file = tmp_path / "servers.txt"

    async def test() -> None:
        slow = StubModel(answer=lambda _: "abcdef" * 10)
        with StubUpstream(slow, hold=0.02) as leaving, StubUpstream() as staying:
            file.write_text(leaving.url)
            async with serve(upstream_file=file) as gateway:
                running = asyncio.create_task(gateway.complete(prompt="a =", suffix="\n"))
                while not leaving.received:
                    await asyncio.sleep(0.01)
                file.write_text(staying.url)
                await gateway.gateway.reload()
                await ask(gateway, 1)
                assert (await running)["choices"][0]["text"] == "abcdef" * 10
                assert len(leaving.received) == 1
                assert len(staying.received) == 1
                pool = gateway.gateway.pool
                while any(each.running for each in pool.upstreams):  # reads what is left
                    await asyncio.sleep(0.01)
                await pool.check()
                assert [each.address for each in pool.upstreams] == [staying.url]

    run(test())


def test_one_that_is_down_at_the_start_is_used_once_it_is_there() -> None:
    async def test() -> None:
        with StubUpstream() as early, StubUpstream(StubModel(owner="llamacpp")) as late:
            late.stop()
            async with serve(early.url, late.url) as gateway:
                for document in range(10):
                    await ask(gateway, document)
                assert late.received == []
                late.start()
                await gateway.gateway.pool.check()
                for document in range(60):  # one of so many is the late server's
                    await ask(gateway, document)
                assert late.received
                assert {each.path for each in late.received} == {"/completion"}

    run(test())


def test_metrics_tell_of_each_server() -> None:
    async def test() -> None:
        with StubUpstream() as one, StubUpstream() as other:
            async with serve(one.url, other.url) as gateway:
                await ask(gateway, 0)
                other.healthy = False
                await gateway.gateway.pool.check()
                lines = (await gateway.client.get("/metrics")).text.splitlines()
            assert f'midfill:upstream_up{{upstream="{one.url}"}} 1.0' in lines
            assert f'midfill:upstream_up{{upstream="{other.url}"}} 0.0' in lines
            assert 'midfill:prompt_tokens_total{model_name="stub-coder",tenant=""}' in str(lines)

    run(test())
