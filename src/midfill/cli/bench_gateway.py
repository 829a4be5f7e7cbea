"""The command ``midfill bench gateway``."""

from typing import Annotated

import typer

from midfill.cli.bench_options import JsonOption
from midfill.cli.outputs import DocsOption
from midfill.reporting.publish import publish

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
    from midfill.bench.gateway import GatewayLoad, gateway_table, measure_gateway

    load = GatewayLoad(rate=rate, seconds=seconds, repeats=repeats, output_tokens=output_tokens)
    report = measure_gateway(load)
    table = gateway_table(report)
    publish(report, table.drawn(), table.markdown(), section="gateway", json=json, docs=docs)
