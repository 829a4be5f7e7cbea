"""TLS: what a server's files may be, and certificates that change; whose address counts."""

import asyncio
import os
import signal
import socket
import ssl
from pathlib import Path

import httpx
import pytest
import trustme
from running_server import start
from starlette.types import Receive, Scope, Send

from midfill.errors import MidfillError
from midfill.serving.options import FrontendOptions, TlsFiles
from midfill.serving.server.key_file import key_digest
from midfill.serving.server.listening import Listener, ServerTls, listen, server_config


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def write_pair(authority: trustme.CA, folder: Path, name: str = "localhost") -> TlsFiles:
    """Write a certificate and its key."""
    issued = authority.issue_cert(name, "127.0.0.1")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    return TlsFiles(certificate, key)


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def serial_number(tls: ServerTls, client: ssl.SSLContext) -> str:
    """Return the serial number of the certificate that a new connection is shown."""
    server = await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=tls.context
    )
    async with server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
        shown = writer.get_extra_info("peercert")
        await reader.read()
        writer.close()
    return str(shown["serialNumber"])


def test_a_certificate_can_be_replaced(tmp_path: Path, authority: trustme.CA) -> None:
    tls, client = ServerTls(write_pair(authority, tmp_path)), trusting(authority)
    first = asyncio.run(serial_number(tls, client))
    write_pair(authority, tmp_path)
    assert asyncio.run(serial_number(tls, client)) == first
    tls.reload()
    assert asyncio.run(serial_number(tls, client)) != first


@pytest.mark.parametrize("text", ["", "nonsense", None])
def test_one_that_cant_be_used_changes_nothing(
    tmp_path: Path, authority: trustme.CA, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    files, client = write_pair(authority, tmp_path), trusting(authority)
    tls = ServerTls(files)
    first = asyncio.run(serial_number(tls, client))
    files.certificate.unlink()
    if text is not None:
        files.certificate.write_text(text)
    tls.reload()
    assert asyncio.run(serial_number(tls, client)) == first
    assert "the TLS certificate stays as it was" in caplog.text


def test_certificate_and_key_may_be_in_one_file(tmp_path: Path, authority: trustme.CA) -> None:
    both = tmp_path / "both.pem"
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(both)
    ServerTls(TlsFiles(both))


class TestBadFiles:
    def reason(self, files: TlsFiles) -> str:
        with pytest.raises(MidfillError) as refused:
            ServerTls(files)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    def test_missing(self, tmp_path: Path, authority: trustme.CA) -> None:
        good = write_pair(authority, tmp_path)
        missing = tmp_path / "none.pem"
        assert "none.pem: can't be read" in self.reason(TlsFiles(missing, good.key))
        assert "none.pem: can't be read" in self.reason(TlsFiles(good.certificate, missing))
        files = TlsFiles(good.certificate, good.key, missing)
        assert "none.pem: can't be read" in self.reason(files)

    def test_no_pem(self, tmp_path: Path, authority: trustme.CA) -> None:
        good = write_pair(authority, tmp_path)
        bad = tmp_path / "bad.pem"
        bad.write_bytes(b"\xff\x00nonsense")
        assert "--ssl-certfile takes a certificate chain" in self.reason(TlsFiles(bad, good.key))
        assert "takes a certificate chain" in self.reason(TlsFiles(good.certificate, bad))
        files = TlsFiles(good.certificate, good.key, bad)
        assert "--ssl-ca-certs takes certificates in PEM" in self.reason(files)

    def test_a_key_of_another_certificate(self, tmp_path: Path, authority: trustme.CA) -> None:
        (tmp_path / "other").mkdir()
        other = write_pair(authority, tmp_path / "other")
        files = TlsFiles(write_pair(authority, tmp_path).certificate, other.key)
        assert "key values mismatch" in self.reason(files)

    def test_a_key_that_needs_a_password(self, tmp_path: Path, authority: trustme.CA) -> None:
        from cryptography.hazmat.primitives import serialization

        files = write_pair(authority, tmp_path)
        assert files.key is not None
        key = serialization.load_pem_private_key(files.key.read_bytes(), None)
        files.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(b"password"),
            )
        )
        assert "key.pem: the private key is encrypted; decrypt it" in self.reason(files)


@pytest.mark.slow
def test_a_server_with_tls(tiny_folder: Path, tmp_path: Path, authority: trustme.CA) -> None:
    """HTTPS alone, for clients with a certificate, and a new certificate after SIGHUP."""
    files = write_pair(authority, tmp_path)
    roots = tmp_path / "roots.pem"
    authority.cert_pem.write_to_path(roots)
    options = ["--ssl-certfile", files.certificate, "--ssl-keyfile", files.key]
    options += ["--ssl-ca-certs", roots, "--kv-memory", "4MB"]
    client = trusting(authority)
    authority.issue_cert("client").configure_cert(client)
    with start(tiny_folder, *map(str, options), verify=client) as server:
        assert server.url.startswith("https://")
        assert len(server.complete(prompt="a", max_tokens=2)["choices"]) == 1
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))

        def shown() -> bytes | None:
            with (
                socket.create_connection(address) as connection,
                client.wrap_socket(connection, server_hostname="127.0.0.1") as wrapped,
            ):
                return wrapped.getpeercert(binary_form=True)

        first = shown()
        write_pair(authority, tmp_path)
        server.process.send_signal(signal.SIGHUP)
        server.wait_for(lambda: shown() != first)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/health", verify=trusting(authority))
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/health")
        assert server.get("/health").status_code == 200


@pytest.mark.parametrize(("trusted", "host"), [(None, "127.0.0.1"), ("127.0.0.1", "192.0.2.7")])
def test_an_address_is_the_connections_unless_a_proxy_is_trusted(
    monkeypatch: pytest.MonkeyPatch, trusted: str | None, host: str
) -> None:
    """Otherwise whoever guesses keys would have as many addresses as they like."""
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["client"][0])

    monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    if trusted is not None:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    scope = {
        "type": "http",
        "scheme": "http",
        "client": ("127.0.0.1", 1),
        "headers": [(b"x-forwarded-for", b"192.0.2.7")],
    }

    async def send_one() -> None:
        await server_config(app).loaded_app(scope, None, None)

    asyncio.run(send_one())
    assert seen == [host]


def test_a_hangup_while_the_model_loads_reads_the_keys_again(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"one:sha256:{key_digest(b'first').hex()}\n")
    found: list[str | None] = []

    async def load(listener: Listener) -> None:
        keys.write_text(f"two:sha256:{key_digest(b'second').hex()}\n")
        os.kill(os.getpid(), signal.SIGHUP)
        for _ in range(10):
            await asyncio.sleep(0.01)
        found.append(listener.keys.find_name(b"second"))

    handlers = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        listen(FrontendOptions(host="127.0.0.1", port=0, api_key_file=keys), load)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert found == ["two"]
