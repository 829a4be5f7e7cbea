"""``midfill methods calibrate``: compute what a method needs to know of a model."""

from typing import Annotated

import typer

from midfill.cli.options import AdapterOption, ModelOption
from midfill.cli.values import checked


def _parse_calibration(text: str) -> str:
    """Return the specification of a method's calibration, checked.

    Raises:
        typer.BadParameter: there is no such method or option, a value doesn't fit, or the method
            needs no calibration.
    """
    from midfill_lab.calibration.registry import resolve_calibrator

    return checked(text, resolve_calibrator)


SpecificationArgument = Annotated[
    str,
    typer.Argument(
        parser=_parse_calibration,
        metavar="NAME[:OPTION=VALUE,...]",
        help="The method, and settings of its calibration.",
    ),
]
AgainOption = Annotated[
    bool, typer.Option("--again", help="Begin anew, whatever has been computed before.")
]


def calibrate(
    method: SpecificationArgument,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    again: AgainOption = False,
) -> None:
    """Compute what a method needs to know of a model, and keep it in the cache folder.

    It is done once per model and adapter. An interrupted calibration continues where it was.
    """
    from midfill.cli.progress import show_progress
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve, resolve_adapter
    from midfill.models.checkpoints.opening import open_model
    from midfill_lab.calibration.calibrate import calibrate as run

    name = model or DEFAULT_MODEL
    with show_progress() as progress:
        checkpoint = open_model(resolve(name, progress), resolve_adapter(name, adapter))
        path = run(method, checkpoint, progress, again=again)
    typer.echo(f"{path}\nmidfill serve --method {method.partition(':')[0]} uses it")
