"""midfill bench profile: where a step's time goes."""

from rich.console import Group

from midfill.cli.bench.options import JsonOption
from midfill.cli.options import ModelArgument, ThreadsOption
from midfill.cli.progress import show_steps
from midfill.system.reporting import publish


def profile(
    model: ModelArgument = None,
    threads: ThreadsOption = None,
    json: JsonOption = None,
) -> None:
    """Show where a step's time goes on the CPU kernels, beside the least that it requires.

    MB and MFLOP are what a step requires: weights and KV read once, and the products. "least ms"
    is their time at the speed of memory, or at the rate that the chip reaches in registers;
    "reached" is that time as a share of the measured one.
    """
    from midfill.lab.bench.profile import measure_profile, profile_tables
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL

    with show_steps("loading") as progress:
        report = measure_profile(model or DEFAULT_MODEL, threads=threads, progress=progress)
    publish(report, Group(*(table.drawn() for table in profile_tables(report))), json)
