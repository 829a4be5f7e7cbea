"""The command ``midfill bench serving``."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from midfill.cli.option_groups import FlagsOf, with_option_groups
from midfill.cli.options import ModelArgument
from midfill.cli.progress import show_steps
from midfill.config import ModelOptions
from midfill.errors import OptionError
from midfill.serving.options import ServeOptions
from midfill_lab.cli.bench.options import ClientFimTokensOption, JsonOption
from midfill_lab.cli.outputs import DocsOption, PlotOption, SectionOption, writable

if TYPE_CHECKING:
    from midfill_lab.bench.serving.workload import WorkloadOptions

WorkloadChoice = Literal["independent", "editing", "agents", "shared-prefix", "mixed"]
LayoutChoice = Literal["ragged", "padded", "packed"]
EndpointChoice = Literal["completions", "chat"]


@dataclass(frozen=True)
class WorkloadFlags:
    """The load; see ``WorkloadOptions``."""

    workload: Annotated[
        WorkloadChoice,
        typer.Option(
            help="independent prompts; users who are editing documents; agents whose programs have"
            " pauses for tools; batches with a shared-prefix; mixed: long documents, short chats."
        ),
    ] = "independent"
    request_rate: Annotated[
        float, typer.Option(help="Requests per second, on average; inf sends all at once.")
    ] = 2.0
    burstiness: Annotated[
        float,
        typer.Option(
            help="Shape of the gamma distribution of gaps between arrivals: 1 is a Poisson process,"
            " less comes in bursts, more is more regular."
        ),
    ] = 1.0
    requests: Annotated[int, typer.Option(min=1, help="Maximum number of requests.")] = 100
    duration: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Time in which requests arrive.")
    ] = None
    users: Annotated[int, typer.Option(min=1, help="Editors, or prefixes that are shared.")] = 8
    tenants: Annotated[
        int, typer.Option(min=1, help="API keys among which users are divided; no cache is shared.")
    ] = 1
    characters: Annotated[
        int, typer.Option(min=50, help="Of a prompt or document, on average.")
    ] = 2000
    output_tokens: Annotated[int, typer.Option(min=1, help="Of an answer, on average.")] = 32
    turns: Annotated[int, typer.Option(min=1, help="Of an agent's program.")] = 4
    pause: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Of an agent's tool, on average.")
    ] = 1.0
    batch: Annotated[
        int, typer.Option(min=1, help="Requests with a shared prefix that arrive together.")
    ] = 8
    deadline: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="When clients give up, on average; never, if not set."
        ),
    ] = None
    seed: Annotated[int, typer.Option(help="Of all random choices.")] = 0

    @property
    def options(self) -> "WorkloadOptions":
        """The same for the benchmark."""
        from midfill_lab.bench.serving.workload import WorkloadOptions

        return WorkloadOptions(**vars(self))


@dataclass(frozen=True)
class TargetFlags:
    """What the load runs on."""

    url: Annotated[
        str | None,
        typer.Option(
            help="An OpenAI-style server, e.g. http://127.0.0.1:8080/v1; if not set, midfill's own"
            " is started for the load."
        ),
    ] = None
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate",
            help="Run the load on a simulated engine: the real scheduler, queues and caches, whose"
            " steps only take their time, on a clock of its own.",
        ),
    ] = False
    check: Annotated[
        bool,
        typer.Option("--check", help="Run it both ways, without drafts, and compare the medians."),
    ] = False
    step_costs: Annotated[
        Path | None,
        typer.Option(
            callback=writable,
            metavar="FILE",
            help="Costs of simulated steps; measured first, and written there, if there is no such"
            " file.",
        ),
    ] = None
    batch_layout: Annotated[
        LayoutChoice,
        typer.Option(
            help="What a simulated step computes: each row once, as midfill does; prompts padded to"
            " the longest; or prompts packed into rows as long as the longest (Prepacking)."
        ),
    ] = "ragged"
    endpoint: Annotated[
        EndpointChoice, typer.Option(help="Send prompts as completions, or as messages of a chat.")
    ] = "completions"
    fim_tokens: ClientFimTokensOption = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Key of the server at --url; may be repeated, one per tenant."),
    ] = None
    hints: Annotated[
        bool,
        typer.Option(
            "--hints",
            help="Send the server at --url what midfill's schedulers look at: priority, job_id,"
            " is_last_step, expected_tokens.",
        ),
    ] = False
    goodput: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:MS,...",
            help="Limits that an answer must keep to count: ttft, tpot, itl (its longest gap),"
            " e2el, as in ttft:200,tpot:50.",
        ),
    ] = None

    @property
    def runs(self) -> tuple[str, ...]:
        """What the load is run on.

        Raises:
            OptionError: options that don't go together.
        """
        from midfill_lab.bench.serving.report import SERVER, SIMULATED

        is_simulated = self.simulate or self.check
        if self.simulate and self.check:
            raise OptionError("--check runs the load both ways; leave out --simulate")
        if is_simulated and self.url is not None:
            raise OptionError("--url names a server of which nothing is known to simulate it")
        if is_simulated and self.endpoint == "chat":
            raise OptionError("--endpoint chat can't be simulated")
        if self.api_key and self.url is None:
            raise OptionError("--api-key is for a server at --url; a started one has its own")
        if self.batch_layout != "ragged" and not self.simulate:
            raise OptionError("--batch-layout is for --simulate; midfill's engine pads nothing")
        if self.hints and self.url is None:
            raise OptionError("--hints is for a server at --url; a started one gets them anyway")
        if self.check:
            return SERVER, SIMULATED
        return (SIMULATED,) if self.simulate else (SERVER,)


_RUN_FIELDS = ("threads", "kv_memory", "adapter", "token_budget", "scheduler", "speculation")
_SERVE_FIELDS = ("max_queued_tokens", "idle_prefill", "stream_interval")


@with_option_groups
def serving(
    model: ModelArgument = None,
    *,
    load: WorkloadFlags,
    target: TargetFlags,
    run: Annotated[dict[str, Any], FlagsOf(ModelOptions, *_RUN_FIELDS)],
    served: Annotated[dict[str, Any], FlagsOf(ServeOptions, *_SERVE_FIELDS)],
    json: JsonOption = None,
    plot: PlotOption = None,
    docs: DocsOption = None,
    section: SectionOption = "serving",
) -> None:
    """Send a load of timed requests, open loop: latencies, throughput, goodput, fairness.

    Requests come at their time whether or not earlier ones have ended. The same seed gives the same
    requests.
    """
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL
    from midfill_lab.bench.serving.measure import ServingPlan, measure_serving
    from midfill_lab.bench.serving.metrics import parse_limits
    from midfill_lab.bench.serving.plot import plot_serving
    from midfill_lab.bench.serving.report import serving_tables
    from midfill_lab.reporting import publish_tables

    options = ModelOptions(**run)
    if target.check or target.simulate:
        options = msgspec.structs.replace(options, speculation=False)
    plan = ServingPlan(
        workload=load.options,
        served=ServeOptions(model=model or DEFAULT_MODEL, options=options, **served),
        url=target.url,
        runs=target.runs,
        limits=None if target.goodput is None else parse_limits(target.goodput),
        costs=target.step_costs,
        endpoint=target.endpoint,
        sentinels=target.fim_tokens,
        api_keys=tuple(target.api_key or ()),
        layout=target.batch_layout,
        sends_hints=target.hints,
    )
    with show_steps("making the load") as progress:
        report = measure_serving(plan, progress)
    publish_tables(report, serving_tables(report), json=json, docs=docs, section=section)
    if plot is not None:
        plot_serving(report, plot)
