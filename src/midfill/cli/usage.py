"""How to use the command line: help in groups, and errors in one line each with status 2."""

import difflib
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from midfill.config import Panel
from midfill.version import __version__

# Typer makes public only some of the errors of the parser that it contains.
_ClickException: type[Any] = typer.BadParameter.__mro__[2]
_NOT_ONE_OF = re.compile(
    r"(?s)(?:Value error, )?'(?P<value>.+)' is (?:not one|none) of (?P<choices>.+?)\.?"
)
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "yes or no",
}


class CommandLine(TyperGroup):
    """The ``midfill`` command."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line; end the process, with ``standalone_mode``."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        try:
            status = super().main(
                args, prog_name, complete_var, False, windows_expand_args, **extra
            )
        except typer.Abort:
            sys.stderr.write("midfill: aborted\n")
            sys.exit(1)
        except _ClickException as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
            else:
                sys.stderr.write(f"midfill: {usage_line(error)}\n")
            sys.exit(error.exit_code)
        sys.exit(status if isinstance(status, int) else 0)


class GroupedHelp(TyperCommand):
    """A command of many options: its help has them in groups, each with its text below its name.

    In a table, names and values would be cut where a terminal is narrow.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        groups: dict[str, list[str]] = {name: [] for name in ("Arguments", *get_args(Panel))}
        width = min(shutil.get_terminal_size().columns, 100)
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            names, text = record
            arguments = parameter.param_type_name == "argument"
            panel = getattr(parameter, "rich_help_panel", None) or get_args(Panel)[0]
            indent = " " * 6
            groups["Arguments" if arguments else panel] += [
                f"  {names}",
                textwrap.fill(
                    " ".join(text.split()), width, initial_indent=indent, subsequent_indent=indent,
                    break_on_hyphens=False,
                ),
            ]  # fmt: skip
        sections = [f"{name}:\n" + "\n".join(lines) for name, lines in groups.items() if lines]
        help = textwrap.fill(self.help or "", width)
        formatter.write("\n\n".join([self.get_usage(ctx), help, *sections]) + "\n")


def root_app(help: str, *, edition: str = "", epilog: str | None = None) -> typer.Typer:
    """Return the ``midfill`` command without subcommands; ``edition`` follows the version."""
    app = typer.Typer(
        name="midfill",
        cls=CommandLine,
        help=help,
        epilog=epilog,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_root_options(edition))
    return app


def _root_options(edition: str) -> Callable[[bool], None]:
    """Return the callback of the options of midfill itself."""

    def show(wanted: bool) -> None:
        if wanted:
            typer.echo(f"midfill {__version__}{edition}")
            raise typer.Exit

    flag = typer.Option("--version", callback=show, is_eager=True, help="Show the version.")

    def root(version: Annotated[bool, flag] = False) -> None:
        """Options of midfill itself."""

    return root


def usage_line(error: Any) -> str:
    """Return what is wrong in one line, and where to look.

    Args:
        error: of Typer's parser, or raised by a check of midfill's own.
    """
    line = " ".join(_problem(error).rstrip(".").split())
    if (context := getattr(error, "ctx", None)) is None:
        return line
    root = context.find_root().command_path
    program = "python -m benchmarks" if root.endswith("benchmarks") else "midfill"
    return f"{line} (see '{program}{context.command_path.removeprefix(root)} --help')"


def did_you_mean(value: str, known: Iterable[str]) -> str:
    """Return the end of a message: the nearest of some names, or all of them if none is near."""
    names = list(known)
    found = difflib.get_close_matches(value, names, n=1)
    return f"did you mean {found[0]}?" if found else f"there are {', '.join(names)}"


def _problem(error: Any) -> str:
    if (option := getattr(error, "option_name", None)) is not None and hasattr(
        error, "possibilities"
    ):
        known = error.possibilities or ()
        nearest = f"; did you mean {known[0]}?" if known else ""
        return f"there is no option {option}{nearest}"
    if isinstance(error, typer.BadParameter) and error.message:
        problem = _bad_value(error)
        # Checks of midfill's own may name the option themselves, and after Typer's.
        if error.param is None or problem.startswith("--"):
            return problem
        name = _name(error.param)
        return f"{name} {problem}" if problem.startswith("takes ") else f"{name}: {problem}"
    message = str(error.format_message())
    message = message.replace("No such command", "there is no command")
    return f"{message[:1].lower()}{message[1:]}".replace(". Did you mean", "; did you mean")


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.human_readable_name)
    return max(parameter.opts, key=len)  # type: ignore[no-any-return]


def _bad_value(error: Any) -> str:
    """Return what is wrong with the value of an option or argument."""
    message = str(error.message)
    if match := _NOT_ONE_OF.fullmatch(message):
        known = [choice.strip("'") for choice in match["choices"].split(", ")]
        return f"there is no {match['value']!r}; {did_you_mean(match['value'], known)}"
    details = getattr(error.__cause__, "errors", None)
    return message if details is None else _invalid(details()[0], message)


def _invalid(detail: Mapping[str, Any], message: str) -> str:
    """Return why a value doesn't validate, in midfill's words where there are some.

    Args:
        detail: what pydantic says of the first problem.
        message: the same as Typer puts it.
    """
    kind, value = str(detail.get("type", "")), detail.get("input")
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return f"takes {words} {detail['ctx'][bound]}, not {value}"
    if (expected := _KINDS.get(kind.partition("_")[0])) is not None:
        return f"takes {expected}, not {value!r}"
    return message.removeprefix("Value error, ")
