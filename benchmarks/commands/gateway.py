"""The commands ``python -m benchmarks gateway`` and ``python -m benchmarks gateway-rounds``."""

from typing import Annotated

import typer

from midfill.cli.bench.options import ClientFimTokensOption, JsonOption, OutputTokensOption
from midfill.cli.outputs import DocsOption
from midfill.cli.progress import show_steps
from midfill.system.extras import require
from midfill.system.reporting.publish import publish

RateOption = Annotated[float, typer.Option(min=0.1, help="Requests per second.")]
SecondsOption = Annotated[float, typer.Option(min=0.5, help="Duration of a run.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Runs of each way, in turn.")]
TokensOption = Annotated[int, typer.Option(min=1, help="Tokens of an answer.")]


def gateway(
    rate: RateOption = 50,
    seconds: SecondsOption = 10,
    repeats: RepeatsOption = 3,
    output_tokens: TokensOption = 16,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure what the gateway adds to a request, in front of a server without a model."""
    from benchmarks.gateway import GatewayLoad, gateway_table, measure_gateway

    load = GatewayLoad(rate=rate, seconds=seconds, repeats=repeats, output_tokens=output_tokens)
    report = measure_gateway(load)
    table = gateway_table(report)
    publish(report, table.drawn(), table.markdown(), section="gateway", json=json, docs=docs)


UpstreamArgument = Annotated[
    str, typer.Argument(help="A server that runs, e.g. http://127.0.0.1:8000.")
]


def gateway_rounds(
    upstream: UpstreamArgument,
    fim_tokens: ClientFimTokensOption = None,
    users: Annotated[int, typer.Option(min=1, help="Documents edited at once.")] = 4,
    rounds: Annotated[int, typer.Option(min=2, max=7, help="Requests per user.")] = 4,
    output_tokens: OutputTokensOption = 4,
    repeats: RepeatsOption = 4,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure EFIM's load on a server, laid out by the client and through a gateway.

    The gateway is started for it. --docs writes a section for each kind of server.
    """
    require("bench gateway-rounds", ["httpx"], extra="bench")
    from benchmarks.gateway_rounds import gateway_rounds_table, measure_gateway_rounds
    from midfill.lab.bench.clients import SPARE_TOKENS
    from midfill.lab.bench.rounds import RoundsOptions
    from midfill.serving.gateway.options import address_of

    options = RoundsOptions(
        users=users, rounds=rounds, output_tokens=output_tokens, repeats=repeats
    )
    with show_steps("starting the gateway") as progress:
        report = measure_gateway_rounds(
            address_of(upstream), fim_tokens or SPARE_TOKENS, options, progress
        )
    table = gateway_rounds_table(report)
    section = f"gateway-rounds-{report.kind}"
    publish(report, table.drawn(), table.markdown(), section=section, json=json, docs=docs)
