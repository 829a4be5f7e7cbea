"""TLS: certificates from files, read again while the server runs."""

import logging
import ssl
from pathlib import Path
from typing import NoReturn

from midfill.config import TlsFiles
from midfill.errors import MidfillError

_log = logging.getLogger(__name__)


class ServerTls:
    """The TLS context of a server.

    Attributes:
        context: for connections; new ones use what was read last.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Read the files.

        Raises:
            MidfillError: one can't be read, or they don't fit together.
        """
        self._files = files
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load_certificate(self.context)
        if files.client_authorities is not None:
            self._load_authorities(files.client_authorities)
            self.context.verify_mode = ssl.CERT_REQUIRED

    def reload(self) -> None:
        """Read certificate and key again; if they can't be used, they stay, and a line says so.

        Connections in progress go on.
        """
        try:
            # On trial first: a context whose loading fails half-way can't be used any more.
            self._load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load_certificate(self.context)
        except MidfillError as error:
            _log.error("the TLS certificate stays as it was: %s", error)
        else:
            _log.warning("the TLS certificate was read again")

    def _load_certificate(self, context: ssl.SSLContext) -> None:
        files = self._files
        for path in (files.certificate, files.key):
            if path is not None:
                _check_readable(path)
        try:
            context.load_cert_chain(files.certificate, files.key, password=self._refuse_password)
        except ssl.SSLError as error:
            where = files.key or files.certificate
            raise MidfillError(
                f"{files.certificate}: can't be used with the key of {where}: {_reason(error)};"
                " --ssl-certfile takes a certificate chain and --ssl-keyfile its private key, both"
                " in PEM"
            ) from None

    def _load_authorities(self, path: Path) -> None:
        _check_readable(path)
        try:
            self.context.load_verify_locations(path)
        except ssl.SSLError as error:
            raise MidfillError(
                f"{path}: --ssl-ca-certs takes certificates in PEM ({_reason(error)})"
            ) from None

    def _refuse_password(self) -> NoReturn:
        where = self._files.key or self._files.certificate
        raise MidfillError(
            f"{where}: the private key is encrypted; decrypt it (openssl pkey -in KEY -out PLAIN)"
        )


def _check_readable(path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise MidfillError(f"{path}: can't be read: {error.strerror or error}") from None


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "no certificate in it").replace("_", " ").lower()
