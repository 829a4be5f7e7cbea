"""midfill bench profile: where a step's time goes."""

from midfill.cli.bench.options import JsonOption, ShapeOption, model_or_shape
from midfill.cli.options import ModelArgument, ThreadsOption
from midfill.cli.outputs import DocsOption
from midfill.cli.progress import show_steps
from midfill.system.reporting.publish import publish


def profile(
    model: ModelArgument = None,
    shape: ShapeOption = None,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Show where a step's time goes on the CPU kernels, beside the least that it requires.

    MB and MFLOP are what a step requires: weights and KV read once, and the products. "least ms"
    is their time at the speed of memory, or at the rate that the chip reaches in registers;
    "reached" is that time as a share of the measured one. With --shape, --docs replaces the section
    of that shape.
    """
    from midfill.lab.bench.profile import measure_profile, profile_markdown, profile_tables

    with show_steps("loading") as progress:
        name = model_or_shape(model, shape, progress)
        report = measure_profile(name, threads=threads, progress=progress)
    drawn, markdown = profile_tables(report), profile_markdown(report)
    section = f"profile-{shape}" if shape else "profile"
    publish(report, drawn, markdown, section=section, json=json, docs=docs)
