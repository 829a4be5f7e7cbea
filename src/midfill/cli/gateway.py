"""``midfill gateway``: the planner in front of other servers."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from midfill.cli.option_groups import FlagsOf, with_option_groups
from midfill.config import ServeOptions

if TYPE_CHECKING:
    from midfill.serving.gateway.run import Gateway
    from midfill.serving.gateway.upstream import ApiName, Upstream

UpstreamOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL", help="A server to stand in front of; may be repeated, for replicas of one."
    ),
]
UpstreamFileOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Further servers, a URL per line; read again on SIGHUP."),
]
UpstreamApiOption = Annotated[
    str,
    typer.Option(
        metavar="auto|vllm|sglang|llama.cpp|midfill|openai",
        help="Which servers they are; by default each is asked.",
    ),
]
UpstreamKeyOption = Annotated[
    str | None,
    typer.Option(
        envvar="MIDFILL_UPSTREAM_KEY", metavar="KEY", help="API key that the servers want."
    ),
]
UpstreamTimeoutOption = Annotated[
    float,
    typer.Option(
        min=0.1,
        metavar="SECONDS",
        help="A server that sends nothing for so long has failed.",
    ),
]
WaitOption = Annotated[
    float,
    typer.Option(min=0, metavar="SECONDS", help="How long to wait at the start for a server."),
]
UpstreamModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="NAME", help="The servers' model to use, where they have several."
    ),
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder of the model's tokenizer.json. Prompts are then sent as token ids.",
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(min=2, help="Maximum tokens of a prompt and its answer; by default the servers'."),
]
IdlePrefillOption = Annotated[
    bool,
    typer.Option(
        help="While a server has no other request of the gateway, have it compute the prompts that"
        " documents will probably need next."
    ),
]

# What a gateway takes as ``midfill serve`` does; the fields of GatewayOptions have the same names.
_SERVED = (
    "fim_tokens", "window", "snippets", "document_memory", "host", "port", "served_name", "aliases",
    "api_keys", "api_key_file", "tls", "allowed_hosts", "logs", "otlp_traces_endpoint",
)  # fmt: skip


@with_option_groups
def gateway(
    *,
    upstream: UpstreamOption = None,
    upstream_file: UpstreamFileOption = None,
    upstream_api: UpstreamApiOption = "auto",
    upstream_key: UpstreamKeyOption = None,
    upstream_timeout: UpstreamTimeoutOption = 120,
    wait: WaitOption = 30,
    model: UpstreamModelOption = None,
    tokenizer: TokenizerOption = None,
    context: ContextOption = None,
    idle_prefill: IdlePrefillOption = False,
    served: Annotated[dict[str, Any], FlagsOf(ServeOptions, *_SERVED)],
) -> None:
    """Stand in front of vLLM, SGLang or llama.cpp, and lay out prompts so that their caches hit."""
    from midfill.serving.gateway.options import GatewayOptions
    from midfill.serving.gateway.run import run_gateway
    from midfill.system.logs import configure_logs

    api = _api_name(upstream_api)
    configure_logs(served["logs"])
    options = GatewayOptions(
        upstreams=tuple(upstream or ()),
        upstream_file=upstream_file,
        upstream_api=api,
        upstream_key=upstream_key,
        upstream_timeout=upstream_timeout,
        wait=wait,
        model=model,
        tokenizer=tokenizer,
        context=context,
        idle_prefill=idle_prefill,
        **served,
    )
    run_gateway(options, lambda url, running: typer.echo(banner(url, running)))


def _api_name(text: str) -> "ApiName":
    """Return the kind of server that an option names.

    Raises:
        typer.BadParameter: there is no such kind.
    """
    from midfill.serving.gateway.upstream import ApiName

    names = get_args(ApiName)
    if text not in names:
        raise typer.BadParameter(f"{text!r} is none of {', '.join(names)}")
    return cast("ApiName", text)


def banner(url: str, gateway: "Gateway") -> str:
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
  curl {url}/v1/completions -H 'Content-Type: application/json' \\
    -d '{json.dumps(body)}'
"""


def _abilities(upstream: "Upstream") -> str:
    """Return what a server is, and what was found out of it."""
    found: list[str] = [upstream.kind]
    if upstream.block_tokens is not None:
        found.append(f"cache blocks of {upstream.block_tokens} tokens")
    found.append("half words forced" if upstream.forces_start else "half words written again")
    return ", ".join(found)
