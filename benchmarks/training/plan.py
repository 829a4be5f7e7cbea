"""TrainingPlan: a run in several stages over published packages, so that anyone can rerun it.

A plan is a TOML file. Each stage has a recipe of its own and starts with the weights and optimizer
of the one before; all read the same documents, in an order that depends on the stage's seed.

A plan is run below one folder: its packages are fetched, stage after stage is trained, and what the
stages leave is joined. What is there already is not done again, so the same command continues after
any interruption.
"""

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.package_sources import (
    Package,
    fetch_packages,
    parse_requirement,
    read_requirements,
)
from midfill.errors import MidfillError
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.model_record import RECORD_FILE
from midfill.system.files import write_folder
from midfill.system.progress import Progress, ignore_progress
from midfill_lab.training.corpus import (
    MANIFEST,
    Corpus,
    ManifestEntry,
    describe_manifest,
    manifest_text,
)
from midfill_lab.training.export import model_card
from midfill_lab.training.recipe import TrainingRecipe
from midfill_lab.training.run_folder import ADAPTER_WEIGHTS, newest_checkpoint
from midfill_lab.training.trainer import CHECKPOINTS
from midfill_lab.training.training_run import RunInputs, TrainingRun, prepare_run

_FIELDS = frozenset(
    {"model", "fim_tokens", "packages", "held_out", "protect", "start", "recipe", "stages"}
)


@dataclass(frozen=True)
class Stage:
    """One part of a plan.

    Attributes:
        name: of its folder.
        recipe: its settings.
    """

    name: str
    recipe: TrainingRecipe


@dataclass(frozen=True)
class StartAdapter:
    """The adapter that the first stage starts with.

    Attributes:
        commit: of the plan's repository, which holds it.
        folder: its folder there.
        sha256: of its weights.
    """

    commit: str
    folder: str
    sha256: str


@dataclass(frozen=True)
class TrainingPlan:
    """A run in stages.

    Attributes:
        path: the plan's file.
        model: the base, by name or path.
        fim_tokens: PRE, SUF and MID; None takes the model's own.
        packages: what is trained on.
        held_out: packages whose documents must not be trained on in any version.
        protected: packages with evaluation texts that no document may copy from.
        start: None starts with the base alone.
        stages: at least one.
    """

    path: Path
    model: str
    fim_tokens: tuple[str, str, str] | None
    packages: tuple[Package, ...]
    held_out: tuple[Package, ...]
    protected: tuple[Package, ...]
    start: StartAdapter | None
    stages: tuple[Stage, ...]


def read_plan(path: Path) -> TrainingPlan:
    """Read a plan; the files it names are beside it.

    Raises:
        MidfillError: a file is missing, or something in one is not understood.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MidfillError(f"{path}: can't be read: {error.strerror or error}") from None
    except ValueError as error:
        raise MidfillError(f"{path}: {error}") from None
    try:
        return _build(path, values)
    except MidfillError as error:
        raise MidfillError(f"{path}: {error}") from None


def _build(path: Path, values: Mapping[str, Any]) -> TrainingPlan:
    unknown = values.keys() - _FIELDS
    if unknown:
        raise MidfillError(f"unknown name {min(unknown)}; known: {', '.join(sorted(_FIELDS))}")
    stages = _stages(values.get("recipe", {}), values.get("stages", []))
    return TrainingPlan(
        path=path,
        model=_text(values, "model"),
        fim_tokens=_fim_tokens(values.get("fim_tokens")),
        packages=_packages(path, values, "packages"),
        held_out=_packages(path, values, "held_out") if "held_out" in values else (),
        protected=tuple(parse_requirement(each) for each in _texts(values, "protect")),
        start=_start(values.get("start")),
        stages=stages,
    )


def _stages(shared: Mapping[str, Any], stages: object) -> tuple[Stage, ...]:
    """Return the stages; a stage's settings go before those that all share."""
    if not isinstance(stages, list) or not stages:
        raise MidfillError("names no [[stages]]")
    made: list[Stage] = []
    for settings in stages:
        name = _text(settings, "name")
        own = {key: value for key, value in settings.items() if key != "name"}
        data = {**shared.get("data", {}), **own.get("data", {})}
        try:
            recipe = TrainingRecipe.from_dict({**shared, **own, "data": data})
        except MidfillError as error:
            raise MidfillError(f"stage {name}: {error}") from None
        if not name.replace("-", "").isalnum() or name in {stage.name for stage in made}:
            raise MidfillError(f"stage {name!r} needs a name of its own: letters, digits, hyphens")
        made.append(Stage(name, recipe))
    return tuple(made)


def _packages(path: Path, values: Mapping[str, Any], name: str) -> tuple[Package, ...]:
    """Return the packages of a list, of several, or of a table: a list and its files' suffixes."""
    lists = values.get(name)
    if isinstance(lists, Mapping):
        suffixes = {file: tuple(_texts(lists, file)) for file in lists}
        return tuple(
            replace(each, suffixes=suffixes[file])
            for file in lists
            for each in read_requirements(path.parent / file)
        )
    files = _texts(values, name) if isinstance(lists, list) else [_text(values, name)]
    return tuple(each for file in files for each in read_requirements(path.parent / file))


def _fim_tokens(value: object) -> tuple[str, str, str] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 3 or not all(isinstance(v, str) for v in value):
        raise MidfillError(f"fim_tokens must be three texts, not {value!r}")
    first, second, third = value
    return first, second, third


def _start(value: object) -> StartAdapter | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or value.keys() != {"commit", "folder", "sha256"}:
        raise MidfillError("start must have commit, folder and sha256")
    return StartAdapter(*(_text(value, name) for name in ("commit", "folder", "sha256")))


def _text(values: object, name: str) -> str:
    value = values.get(name) if isinstance(values, Mapping) else None
    if not isinstance(value, str) or not value:
        raise MidfillError(f"{name} must be a text, not {value!r}")
    return value


def _texts(values: Mapping[str, Any], name: str) -> list[str]:
    value = values.get(name, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise MidfillError(f"{name} must be a list of texts, not {value!r}")
    return value


_PROTECTED_SUFFIXES = (".jsonl.gz", ".jsonl", ".parquet")


def prepare_stages(
    plan: TrainingPlan,
    checkpoint: Checkpoint,
    folder: Path,
    *,
    base_name: str | None = None,
    progress: Progress = ignore_progress,
) -> Iterator[tuple[str, TrainingRun]]:
    """Yield the stages that are not finished: each one's name and its prepared run.

    The caller trains a run and finishes it before it asks for the next one.

    Args:
        plan: the plan.
        checkpoint: its base.
        folder: gets packages and stages.
        base_name: the base's public name.
        progress: receives what is being fetched.

    Raises:
        MidfillError: something can't be fetched, or the folder holds another plan's stages.
    """
    sources = folder / "packages"
    suffixes = tuple(dict.fromkeys(each for s in plan.stages for each in s.recipe.data.suffixes))
    fetch_packages(plan.packages, sources / "src", suffixes, progress)
    held_out = fetch_packages(plan.held_out, sources / "held-out", suffixes, progress)
    protected = fetch_packages(plan.protected, sources / "protected", (".gz", ".jsonl"), progress)
    start = None if plan.start is None else _fetch_start(plan.start, plan.path.parent, folder)
    for number, stage in enumerate(plan.stages, 1):
        place = stage_folder(folder, number, stage.name)
        if not (place / "adapter").is_dir():
            data = stage.recipe.data
            inputs = RunInputs(
                documents=Corpus.find([sources / "src"], data.suffixes, data.suffix_shares),
                folder=place,
                fim_tokens=plan.fim_tokens,
                protected=Corpus.find(_records(protected), ()) if protected else None,
                held_out=Corpus.find(held_out, suffixes) if held_out else None,
                start_from=start,
                base_name=base_name,
            )
            yield stage.name, prepare_run(checkpoint, stage.recipe, inputs)
        start = newest_checkpoint(place / CHECKPOINTS)


def stage_folder(folder: Path, number: int, name: str) -> Path:
    """Return the folder of a stage; stages are counted from 1."""
    return folder / f"{number}-{name}"


def join_stages(plan: TrainingPlan, folder: Path) -> Path:
    """Write ``folder/adapter``: the last stage's weights, with a record of all stages.

    Raises:
        MidfillError: a stage's files are missing or broken.
    """
    places = [
        stage_folder(folder, number, stage.name) for number, stage in enumerate(plan.stages, 1)
    ]
    manifest = {each.sha256: each for place in places for each in read_manifest(place / MANIFEST)}
    record = _joined_record(plan, [_read_record(place / "adapter") for place in places])
    record["data"] |= describe_manifest(manifest.values())

    def write(target: Path) -> None:
        for path in (places[-1] / "adapter").iterdir():
            shutil.copy(path, target / path.name)
        (target / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        (target / "README.md").write_text(model_card(record, adapter=True), encoding="utf-8")
        (target / MANIFEST).write_text(manifest_text(manifest.values()), encoding="utf-8")

    write_folder(folder / "adapter", write)
    return folder / "adapter"


def read_manifest(path: Path) -> list[ManifestEntry]:
    """Read a manifest.

    Raises:
        MidfillError: the file is missing or broken.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [ManifestEntry(**json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError) as error:
        raise MidfillError(f"{path}: not a manifest: {error}") from None


def _joined_record(plan: TrainingPlan, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last stage's record with the sums and settings of all stages."""
    last = dict(records[-1])
    stages = {
        f"{number}: {stage.name}": {
            **{key: record["training"][key] for key in ("steps", "tokens", "hours")},
            "loss_first_to_last_tenth": "{first_loss} to {last_loss}".format(**record["training"]),
            "seed": stage.recipe.seed,
        }
        for number, (stage, record) in enumerate(zip(plan.stages, records, strict=True), 1)
    }
    training = {key: last["training"][key] for key in ("made_with", "date", "machine", "precision")}
    training["tokens"] = sum(record["training"]["tokens"] for record in records)
    training["hours"] = round(sum(record["training"]["hours"] for record in records), 2)
    if plan.start is not None:
        training["start"] = f"adapter of commit {plan.start.commit}, sha256 {plan.start.sha256}"
    held_out = ", ".join(str(package) for package in (*plan.held_out, *plan.protected))
    last["training"] = training | {"stages": stages}
    last["data"] = {"kept_out": held_out}
    return last


def _read_record(adapter: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((adapter / RECORD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MidfillError(f"{adapter}: not a trained adapter: {error}") from None
    return record


def _records(folders: Sequence[Path]) -> list[Path]:
    """Return the files of records in packages."""
    return sorted(
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.name.endswith(_PROTECTED_SUFFIXES)
    )


def _git(folder: Path, *arguments: str) -> bytes:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, check=True).stdout


def _fetch_start(start: StartAdapter, repository: Path, folder: Path) -> Path:
    """Return the folder of the adapter to start with, taken from the plan's repository.

    Raises:
        MidfillError: the commit is not there, or holds other weights.
    """
    target = folder / "start"
    if not target.is_dir():
        try:
            # git archives a tree from the top of the repository only.
            top = _git(repository, "rev-parse", "--show-toplevel").decode().strip()
            packed = _git(Path(top), "archive", "--format=tar", f"{start.commit}:{start.folder}")
        except (OSError, subprocess.CalledProcessError) as error:
            raise MidfillError(
                f"the plan starts with an adapter of commit {start.commit}, which is not to be had:"
                f" run it from a git checkout with that commit ({error})"
            ) from None

        def unpack(place: Path) -> None:
            with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                archive.extractall(place, filter="data")

        write_folder(target, unpack)
    try:
        digest = hashlib.sha256((target / ADAPTER_WEIGHTS).read_bytes()).hexdigest()
    except OSError as error:
        raise MidfillError(f"{target}: not an adapter: {error}") from None
    if digest != start.sha256:
        raise MidfillError(f"{target}: its weights have the sha256 {digest}, not {start.sha256}")
    return target
