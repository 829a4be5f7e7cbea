"""TrainingPlan: a run in several stages over published packages, so that anyone can rerun it.

A plan is a TOML file. Each stage has a recipe of its own and starts with the weights and optimizer
of the one before; all read the same documents, in an order that depends on the stage's seed.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midfill.errors import MidfillError
from midfill.lab.training.recipe import TrainingRecipe
from midfill.system.packages import Package, parse_requirement, read_requirements

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
        packages=_packages(path, [_text(values, "packages")]),
        held_out=_packages(path, _texts(values, "held_out")),
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


def _packages(path: Path, files: list[str]) -> tuple[Package, ...]:
    return tuple(each for name in files for each in read_requirements(path.parent / name))


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
