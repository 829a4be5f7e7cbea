"""``python -m benchmarks``: the measurements that docs/ quotes, one command each."""

import sys
from importlib import import_module

import typer

from midfill.cli import run
from midfill.cli.usage import CommandLine

COMMANDS = {
    "attacks": "reliability.attacks",
    "autotuning": "autotuning",
    "beyond-context": "beyond_context",
    "cached-documents": "cached_documents",
    "cascade": "cascade",
    "codecs": "codecs",
    "compare": "compare.commands",
    "conversations": "conversations.measure",
    "cores": "cores",
    "decode-length": "decode_length",
    "disaggregation": "disaggregation.measure",
    "evaluation-page": "evaluation.commands",
    "expert-offload": "expert_offload",
    "gateway": "gateway",
    "gateway-rounds": "gateway_rounds",
    "gpu-steps": "gpu_steps",
    "held-out": "evaluation.commands",
    "keystrokes": "keystrokes",
    "kills": "reliability.kills",
    "kv-cache-dtypes": "kv_cache_dtypes",
    "kv-moves": "kv_moves",
    "layouts": "layouts.measure",
    "overload": "reliability.overload",
    "plugins": "plugins.measure",
    "precision": "precision",
    "prefill": "prefill",
    "pruning": "pruning",
    "replicas": "replicas",
    "reuse": "reuse",
    "reuse-loads": "reuse_loads",
    "schedulers": "schedulers",
    "shape": "shapes.command",
    "shape-speeds": "shapes.speeds",
    "soak": "reliability.soak",
    "state-rows": "state_rows",
    "tables": "tables",
    "tenants": "tenants",
    "tiers": "tiers",
    "training-corpus": "training.commands",
    "typed-over": "typed_over",
}
"""Command -> module that has a function, or a group of commands, of its name."""


def make_app(*names: str) -> typer.Typer:
    """Return the command line with some of the commands; only their modules are imported."""
    app = typer.Typer(
        name="python -m benchmarks",
        cls=CommandLine,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Measure midfill for its documentation: tables on the terminal, figures as JSON, plots"
        " and Markdown. What you run on your own machine and model is in midfill bench.",
    )
    app.callback()(_benchmarks)
    for name in names:
        command = getattr(import_module(f"benchmarks.{COMMANDS[name]}"), name.replace("-", "_"))
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def _benchmarks() -> None:
    """Measure midfill for its documentation."""


if __name__ == "__main__":
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    sys.exit(run(make_app(*([asked] if asked in COMMANDS else COMMANDS))))
