"""``midfill gateway``: the planner in front of other servers."""

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midfill.cli.option_groups import FlagsOf, with_option_groups
from midfill.serving.gateway.options import GatewayOptions
from midfill.serving.options import FrontendOptions

if TYPE_CHECKING:
    from midfill.serving.gateway.gateway import Gateway
    from midfill.serving.gateway.upstream import Upstream

UpstreamModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="NAME", help="The servers' model to use, where they have several."
    ),
]
_SERVED = tuple(each.name for each in fields(FrontendOptions))


@with_option_groups
def gateway(
    *,
    behind: Annotated[dict[str, Any], FlagsOf(GatewayOptions, leave_out=_SERVED)],
    model: UpstreamModelOption = None,
    served: Annotated[dict[str, Any], FlagsOf(GatewayOptions, *_SERVED)],
) -> None:
    """Stand in front of vLLM, SGLang or llama.cpp, and lay out prompts so that their caches hit."""
    from midfill.system.extras import require

    require("midfill gateway", ["aiohttp"], extra="gateway")
    from midfill.serving.gateway.gateway import run_gateway
    from midfill.system.logs import configure_logs

    configure_logs(served["logs"])
    options = GatewayOptions(model=model, **behind, **served)
    run_gateway(options, lambda url, running: typer.echo(banner(url, running, options.key_header)))


def banner(url: str, gateway: "Gateway", key_header: str) -> str:
    """Return what is shown when the gateway is ready: what it stands before and how to try it."""
    from midfill.version import __version__

    service, model = gateway.service, gateway.model
    if (format := service.fim_format) is not None:
        sentinels = [each.text for each in (format.prefix, format.suffix, format.middle) if each]
        infill = f"FIM tokens {' '.join(sentinels)}"
    else:
        infill = "no FIM tokens known: the model sees the prefix alone (--fim-tokens names some)"
    prompts = "text, tokenised by the servers"
    if model.has_tokenizer:
        prompts = f"token ids, by {model.path}"
    servers = "\n".join(
        f"  server   {each.address} ({_abilities(each)})"
        if each.fault is None
        else f"  server   {each.address} {each.fault}"
        for each in gateway.pool.upstreams
    )
    body = {"prompt": "def mean(values):\n    return ", "suffix": "\n", "max_tokens": 16}
    return f"""midfill {__version__} stands in front of {service.name}
{servers}
  prompts  {prompts}; context {service.context} tokens
  infill   {infill}
  listens  on {url} (Ctrl-C stops it)

Try it:
  curl {url}/v1/completions -H 'Content-Type: application/json'{key_header} \\
    -d '{json.dumps(body)}'
"""


def _abilities(upstream: "Upstream") -> str:
    """Return what a server is, and what was found out of it."""
    found: list[str] = [upstream.kind]
    if upstream.block_tokens is not None:
        found.append(f"cache blocks of {upstream.block_tokens} tokens")
    found.append("half words forced" if upstream.forces_start else "half words written again")
    return ", ".join(found)
