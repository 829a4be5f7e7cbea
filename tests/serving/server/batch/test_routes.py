"""/v1/files and /v1/batches, as OpenAI's own library uses them."""

import hashlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from processes import wait_for
from running_server import RunningServer, start

pytest.importorskip("python_multipart")

KEYS = ("one-key", "other-key")
OPTIONS = ("--kv-memory", "4MB", "--min-confidence", "0")
URL = "/v1/completions"


def row(number: int, **body: object) -> dict[str, Any]:
    fields = {"prompt": f"alpha beta {number}", "max_tokens": 3, "temperature": 0, **body}
    return {"custom_id": f"row {number}", "method": "POST", "url": URL, "body": fields}


def lines(*rows: object) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in rows).encode()


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("batches")
    key_file = folder / "keys"
    lines = [f"{key}:sha256:{hashlib.sha256(key.encode()).hexdigest()}" for key in KEYS]
    # A batch may have more rows, which have more tokens.
    key_file.write_text("\n".join([*lines, "*:limits:running=2 tokens=100"]) + "\n")
    keys = ("--api-key-file", str(key_file))
    batches = ("--batch-storage", "100KB", "--batch-folder", str(folder))
    bounds = ("--batch-files", "12", "--batch-rows", "310")
    with start(tiny_folder, *OPTIONS, *keys, *batches, *bounds) as server:
        server.api_key = KEYS[0]
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    yield server.openai(KEYS[0])
    for key in KEYS:
        client = server.openai(key)
        for each in client.batches.list():
            if each.status in ("validating", "in_progress"):
                client.batches.cancel(each.id)
        for each in client.batches.list():
            ended(client, each.id)
        for file in client.files.list():
            client.files.delete(file.id)


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    """Return a batch once it has ended."""

    def is_over() -> bool:
        status = client.batches.retrieve(batch_id).status
        return status in ("completed", "failed", "cancelled")

    wait_for(is_over)
    return client.batches.retrieve(batch_id)


def begin(client: openai.OpenAI, content: bytes, **options: Any) -> Any:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=URL, completion_window="24h", **options
    )


def results(client: openai.OpenAI, file_id: str) -> dict[str, Any]:
    content = client.files.content(file_id).read()
    return {each["custom_id"]: each for each in map(json.loads, content.splitlines())}


def test_a_batch_from_upload_to_results(client: openai.OpenAI, server: RunningServer) -> None:
    rows = [row(number) for number in range(6)]
    rows.append({**row(6), "url": "/v1/chat/completions"})
    rows.append(row(7, temperature="hot"))
    begun = begin(client, lines(*rows), metadata={"job": "nightly"})
    assert (begun.object, begun.status, begun.endpoint) == ("batch", "validating", URL)
    batch = ended(client, begun.id)
    assert batch.status == "completed"
    assert batch.metadata == {"job": "nightly"}
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (8, 6, 2)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    good, bad = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert sorted(good) == [f"row {number}" for number in range(6)]
    assert bad["row 6"]["error"]["code"] == "invalid_url"
    assert bad["row 7"]["response"]["status_code"] == 400
    alone = httpx.post(
        server.url + URL, json=rows[3]["body"],
        headers={"authorization": f"Bearer {KEYS[0]}"},
    ).json()  # fmt: skip
    assert good["row 3"]["response"]["body"]["choices"] == alone["choices"]
    assert next(iter(client.batches.list())).id == batch.id


def test_files_are_listed_described_and_deleted(client: openai.OpenAI) -> None:
    content = lines(row(1))
    made = [client.files.create(file=(f"{n}.jsonl", content), purpose="batch") for n in range(3)]
    assert (made[0].bytes, made[0].filename, made[0].purpose) == (len(content), "0.jsonl", "batch")
    assert [each.id for each in client.files.list()] == [each.id for each in made[::-1]]
    page = client.files.list(limit=2)
    assert [each.id for each in page.data] == [made[2].id, made[1].id]
    assert client.files.retrieve(made[1].id) == made[1]
    assert client.files.content(made[1].id).read() == content
    assert client.files.delete(made[1].id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made[1].id)
    with pytest.raises(openai.NotFoundError):
        client.files.content(made[1].id)


def test_a_tenant_never_sees_anothers_files_or_batches(
    client: openai.OpenAI, server: RunningServer
) -> None:
    batch = ended(client, begin(client, lines(row(1))).id)
    other = server.openai(KEYS[1])
    assert list(other.files.list()) == []
    assert batch.id not in [each.id for each in other.batches.list()]
    for call in (
        lambda: other.files.retrieve(batch.output_file_id),
        lambda: other.files.content(batch.output_file_id),
        lambda: other.files.delete(batch.input_file_id),
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.batches.create(
            input_file_id=batch.input_file_id, endpoint=URL, completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    for path in ("/v1/files", "/v1/batches", f"/v1/batches/{batch.id}", "/v1/files/x/content"):
        assert httpx.get(server.url + path).status_code == 401
    for path in ("/v1/files", "/v1/batches", f"/v1/batches/{batch.id}/cancel"):
        assert httpx.post(server.url + path, content=b"x").status_code == 401
    assert httpx.delete(f"{server.url}/v1/files/{batch.input_file_id}").status_code == 401


def test_what_a_tenant_stores_is_bounded(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.files.create(file=("large.jsonl", b"x" * 150_000), purpose="batch")
    assert (caught.value.status_code, caught.value.code) == (413, "storage_full")
    client.files.create(file=("half.jsonl", b"x" * 60_000), purpose="batch")
    with pytest.raises(openai.APIStatusError) as caught:
        client.files.create(file=("half.jsonl", b"x" * 60_000), purpose="batch")
    assert caught.value.status_code == 413
    for _ in range(11):
        client.files.create(file=("small.jsonl", b"x"), purpose="batch")
    with pytest.raises(openai.BadRequestError) as few:
        client.files.create(file=("small.jsonl", b"x"), purpose="batch")
    assert few.value.code == "too_many_files"


def test_bad_requests_are_refused(client: openai.OpenAI, server: RunningServer) -> None:
    file = client.files.create(file=("in.jsonl", lines(row(1))), purpose="batch")
    for fields in (
        {"endpoint": "/v1/embeddings"},
        {"completion_window": "1h"},
        {"metadata": {"k" * 65: "v"}},
    ):
        body: Any = {"endpoint": URL, "completion_window": "24h", **fields}
        with pytest.raises(openai.BadRequestError):
            client.batches.create(input_file_id=file.id, **body)
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("in.jsonl", b"x"), purpose="assistants")
    post = {"headers": {"authorization": f"Bearer {KEYS[0]}"}, "url": f"{server.url}/v1/files"}
    form: Any = {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch"}}
    assert httpx.post(**post, **form).status_code == 200
    assert httpx.post(**post, json={}).status_code == 415
    assert httpx.post(**post, data={"purpose": "batch"}).status_code == 415
    assert httpx.post(**post, files={"file": ("a", b"x")}).status_code == 400
    assert httpx.post(**post, files={"purpose": (None, "batch")}).status_code == 400
    twice = [("file", ("a", b"x")), ("file", ("b", b"x"))]
    assert httpx.post(**post, files=twice, data={"purpose": "batch"}).status_code == 400
    post["headers"] = {**post["headers"], "origin": "http://evil.example"}
    assert httpx.post(**post, **form).status_code == 415
    kind = "multipart/form-data; boundary=b"
    post["headers"] = {"authorization": f"Bearer {KEYS[0]}", "content-type": kind}
    for body in (
        b"",
        b"x",
        b"--b\r\n",
        b"--b\r\nContent-Disposition: form-data; name=file\r\n\r\nx",
    ):
        assert httpx.post(**post, content=body).status_code == 400, body


def test_a_batch_gives_way_and_can_be_cancelled(
    client: openai.OpenAI, server: RunningServer
) -> None:
    begun = begin(client, lines(*(row(number, max_tokens=60, ignore_eos=True)
                                  for number in range(200))))  # fmt: skip

    def running() -> float:
        return server.metric("num_requests_running")

    with pytest.raises(openai.ConflictError, match="cancel it first"):
        client.files.delete(begun.input_file_id)
    wait_for(lambda: running() > 0)
    assert client.batches.cancel(begun.id).status in ("cancelling", "cancelled")
    batch = ended(client, begun.id)
    assert batch.status == "cancelled"
    assert batch.cancelling_at <= batch.cancelled_at
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(begun.id)


def test_a_batch_waits_for_no_batch_of_another_key(
    client: openai.OpenAI, server: RunningServer
) -> None:
    many = (row(number, max_tokens=60, ignore_eos=True) for number in range(150))
    large = begin(client, lines(*many))
    server.wait_for(lambda: client.batches.retrieve(large.id).request_counts.completed > 0)
    other = server.openai(KEYS[1])
    small = begin(other, lines(row(1), row(2)))
    assert ended(other, small.id).request_counts.completed == 2
    assert client.batches.retrieve(large.id).status == "in_progress"
    later = begin(client, lines(row(1)))
    client.batches.cancel(large.id)
    assert ended(client, later.id).request_counts.completed == 1


def test_rows_have_a_limit_of_their_own_and_count_for_no_other(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="311 rows; a batch has at most 310"):
        begin(client, lines(*map(row, range(311))))
    first = begin(client, lines(*(row(number, max_tokens=60) for number in range(160))))
    assert first.request_counts.total == 160
    with pytest.raises(openai.RateLimitError) as caught:
        begin(client, lines(*map(row, range(160))))
    assert caught.value.code == "too_many_rows"
    client.batches.cancel(first.id)
    ended(client, first.id)
    for file in client.files.list():  # or there is no room for results
        client.files.delete(file.id)
    batch = ended(client, begin(client, lines(*map(row, range(40)))).id)
    assert batch.request_counts.completed == 40
    usages = [each["response"]["body"]["usage"] for each in
              results(client, batch.output_file_id).values()]  # fmt: skip
    assert sum(usage["total_tokens"] for usage in usages) > 100
    assert client.completions.create(model="", prompt="alpha", max_tokens=1).usage is not None


def test_an_unfinished_batch_goes_on_after_a_restart(tiny_folder: Path, tmp_path: Path) -> None:
    batches = ("--batch-storage", "1MB", "--batch-folder", str(tmp_path / "batches"))
    count = 40
    rows = [row(number, max_tokens=20, ignore_eos=True) for number in range(count)]
    with start(tiny_folder, *OPTIONS, *batches, step_seconds=0.03) as server:
        client = server.openai()
        begun = begin(client, lines(*rows))
        wait_for(lambda: client.batches.retrieve(begun.id).request_counts.completed > 0)
        before = client.batches.retrieve(begun.id).request_counts.completed
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    assert before < count
    with start(tiny_folder, *OPTIONS, *batches) as server:
        client = server.openai()
        batch = ended(client, begun.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", count)
        assert len(results(client, batch.output_file_id)) == count


def test_a_warm_document_stays_warm_beside_a_batch_that_is_larger_than_the_pool(
    tiny_folder: Path, tmp_path: Path
) -> None:
    batches = ("--batch-storage", "1MB", "--batch-folder", str(tmp_path / "batches"))
    rows = [row(number, prompt=f"{number} " * 40, max_tokens=8) for number in range(60)]
    document = {"prompt": "alpha beta " * 40, "suffix": "\n", "max_tokens": 1, "temperature": 0}
    small = ("--kv-memory", "400KB", "--min-confidence", "0", "--no-idle-prefill")
    with start(tiny_folder, *small, *batches) as server:

        def uncached() -> int:
            usage = server.complete(**document)["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            return int(usage["prompt_tokens"] - cached)

        assert uncached() > 50
        client = server.openai()
        begun = begin(client, lines(*rows))
        for count in (20, 40):
            server.wait_for(
                lambda count=count: (
                    client.batches.retrieve(begun.id).request_counts.completed  # type: ignore[misc]
                    >= count
                )
            )
            assert uncached() <= 2
        assert ended(client, begun.id).request_counts.completed == 60
        assert server.metric("evicted_tokens_total") > server.metric("kv_slots")
        assert uncached() <= 2


def test_a_batch_gives_way_to_others_and_its_answers_are_the_same(
    tiny_folder: Path, tmp_path: Path
) -> None:
    rows = [row(number, max_tokens=40, ignore_eos=True, logprobs=1) for number in range(3)]
    folder = ("--batch-storage", "1MB", "--batch-folder", str(tmp_path / "batches"))
    with start(tiny_folder, *OPTIONS, *folder, step_seconds=0.03) as server:
        client = server.openai()
        begun = begin(client, lines(*rows))
        wait_for(lambda: server.metric("num_requests_running") > 0)
        asked = server.complete(prompt="gamma", max_tokens=2)
        assert asked["usage"]["completion_tokens"] == 2
        assert server.metric("num_requests_running") == 0
        batch = ended(client, begun.id)
        good = results(client, batch.output_file_id)
        for each in rows:
            body = good[each["custom_id"]]["response"]["body"]
            alone = server.complete(**each["body"])
            assert body["choices"] == alone["choices"]
            assert body["usage"]["completion_tokens"] == 40
            assert body["usage"]["prompt_tokens_details"]["cached_tokens"] < 10
