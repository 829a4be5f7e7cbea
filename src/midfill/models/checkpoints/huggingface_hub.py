"""Models of the Hugging Face hub: downloading them, and finding downloaded ones.

The ``huggingface_hub`` library does transfers, resuming, locks, credentials and the cache folder.
It is configured as usual (HF_HOME, HF_TOKEN, HF_ENDPOINT, ...).
"""

import io
import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from midfill.errors import ModelNotFoundError
from midfill.system.progress import Progress

_NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(?::(?P<file>[^:]+\.gguf))?", re.ASCII)
_FILE_ENDINGS = (".gguf", ".safetensors", ".json", ".bin")
_WANTED = ("*.safetensors", "*.json", "*.jinja")
_UNWANTED = ("*/*", "consolidated*")  # other formats' copies of the same weights
T = TypeVar("T")

_INDEX = "model.safetensors.index.json"
State = Literal["ready", "incomplete", "not pulled"]


@dataclass(frozen=True)
class RepositoryName:
    """A model on the hub.

    Attributes:
        repository: ``ORG/NAME``.
        file: the one file wanted of it; None for the whole model.
    """

    repository: str
    file: str | None

    def __str__(self) -> str:
        return self.repository if self.file is None else f"{self.repository}:{self.file}"


@dataclass(frozen=True)
class ModelEntry:
    """A model that ``midfill models`` lists.

    Attributes:
        name: its name on the command line.
        path: folder or file where it is or will be; None for an incomplete repository.
        bytes: its size on disk, now or once it is downloaded.
        format: the weights' format.
        state: "incomplete" for an interrupted download.
    """

    name: str
    path: Path | None
    bytes: int
    format: Literal["gguf", "safetensors"]
    state: State


def parse_name(text: str) -> RepositoryName | None:
    """Parse ``ORG/NAME`` or ``ORG/NAME:FILE.gguf``; return None for anything else."""
    match = _NAME.fullmatch(text)
    if match is None or match["repository"].endswith(_FILE_ENDINGS):
        return None
    return RepositoryName(match["repository"], match["file"])


def find_local(name: RepositoryName) -> Path | None:
    """Return the model's folder or file if it is complete on disk; never use the network.

    A repository without a file name stands for its folder, or for its only GGUF file on disk.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name.repository, name.file or "config.json")
    except HFValidationError:
        return None
    path = _model_in(Path(found).parent, name) if isinstance(found, str) else None
    if path is not None or name.file is not None:
        return path
    files = [model for model in list_local() if model.name.startswith(f"{name}:")]
    return files[0].path if len(files) == 1 else None


def pull(name: RepositoryName, progress: Progress) -> Path:
    """Download a model, or what has changed of it.

    Returns:
        The folder of a safetensors model, or the file of a GGUF model.

    Raises:
        ModelNotFoundError: there is no such repository, it holds no model that midfill can load, or
            the hub can't be reached.
    """
    from huggingface_hub import HfApi, snapshot_download

    progress(f"looking up {name}", 0, 0)
    info = _with_clear_errors(name, lambda: HfApi().model_info(name.repository))
    file = _wanted_file(name, [sibling.rfilename for sibling in info.siblings or ()])
    folder = _with_clear_errors(
        name,
        lambda: snapshot_download(
            name.repository,
            allow_patterns=list(_WANTED) if file is None else [file],
            ignore_patterns=list(_UNWANTED) if file is None else None,
            tqdm_class=_reporting_bar(f"downloading {name}", progress),
        ),
    )
    path = _model_in(Path(folder), RepositoryName(name.repository, file))
    if path is None:
        raise ModelNotFoundError(f"{name}: the repository lacks files that its model needs")
    return path


def list_local() -> list[ModelEntry]:
    """Return all models of the hub on disk: GGUF files, and folders of a supported family."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return []
    models = []
    for repo in sorted(cache.repos, key=lambda repo: str(repo.repo_id)):
        if repo.repo_type != "model" or not repo.revisions:
            continue
        newest = max(
            repo.revisions, key=lambda revision: ("main" in revision.refs, revision.last_modified)
        )
        models += _models_in(str(repo.repo_id), newest.snapshot_path)
    return models


def _models_in(repository: str, folder: Path) -> list[ModelEntry]:
    models = []
    if _is_supported(folder):
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        path = _model_in(folder, RepositoryName(repository, None))
        state: State = "incomplete" if path is None else "ready"
        models.append(ModelEntry(repository, path, weights, "safetensors", state))
    for file in sorted(folder.glob("*.gguf")):
        name = f"{repository}:{file.name}"
        models.append(ModelEntry(name, file, file.stat().st_size, "gguf", "ready"))
    return models


def _is_supported(folder: Path) -> bool:
    from midfill.models.families import FAMILIES

    try:
        return json.loads((folder / "config.json").read_bytes()).get("model_type") in FAMILIES
    except (OSError, ValueError, AttributeError):
        return False


def _model_in(folder: Path, name: RepositoryName) -> Path | None:
    """Return the model's path if all its files are in a snapshot's folder."""
    if name.file is not None:
        return folder / name.file if (folder / name.file).is_file() else None
    needed = {"config.json", "tokenizer.json"}
    try:
        index = json.loads((folder / _INDEX).read_bytes())
        needed |= set(index["weight_map"].values())
    except FileNotFoundError:
        needed.add("model.safetensors")
    except (ValueError, LookupError, AttributeError, TypeError):
        return None
    return folder if all((folder / file).is_file() for file in needed) else None


def _wanted_file(name: RepositoryName, files: Collection[str]) -> str | None:
    """Return the one file to download, None for a safetensors folder."""
    choices = sorted(file for file in files if file.endswith(".gguf"))
    named = ", ".join(f"{name.repository}:{file}" for file in choices)
    if name.file is not None:
        if name.file not in files:
            raise ModelNotFoundError(
                f"{name.repository} has no file {name.file}"
                + (f"; name one of: {named}" if choices else " and no other GGUF file")
            )
        return name.file
    if any("/" not in file and file.endswith(".safetensors") for file in files):
        return None
    if len(choices) == 1:
        return choices[0]
    if choices:
        raise ModelNotFoundError(f"{name.repository} holds several models, name one: {named}")
    raise ModelNotFoundError(f"{name.repository} holds neither safetensors nor GGUF files")


def _with_clear_errors(name: RepositoryName, action: Callable[[], T]) -> T:
    """Call the hub; turn failures into one line that a user can act on."""
    from huggingface_hub import constants, errors

    try:
        return action()
    except errors.GatedRepoError:
        problem = "accept its licence on the hub, then set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        problem = "the hub has no such repository; for a private one set HF_TOKEN"
    except Exception as error:  # connection errors are of whichever HTTP library it uses
        reason = (str(error) or type(error).__name__).splitlines()[0]
        problem = f"can't be fetched from {constants.ENDPOINT}: {reason}"
    raise ModelNotFoundError(f"{name}: {problem}")


def _reporting_bar(what: str, progress: Progress) -> type[Any]:
    """Return a tqdm class that draws nothing and reports bytes over all files to ``progress``.

    The hub library runs several bars at once: files done, bytes received, bytes written. Progress
    is that of the furthest one that counts bytes.
    """
    from tqdm import tqdm

    bars: list[Any] = []

    class ReportingBar(tqdm):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, *args: object, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            kwargs.update(file=io.StringIO(), disable=False)
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **kwargs)
            if self._counts_bytes:
                bars.append(self)

        def update(self, n: float | None = 1) -> bool | None:
            drawn: bool | None = super().update(n)
            if self._counts_bytes:
                done, total = max((int(bar.n), int(bar.total or 0)) for bar in bars)
                progress(what, done, total)
            return drawn

    return ReportingBar
