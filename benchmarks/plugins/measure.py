"""The tokens that one editing session computes as each plugin sends it.

Every plugin replays the same sessions of the editing mix against the server's own application:
requests are read by its dialects, planned, tokenised, and answered by an engine that is a prefix
cache and no model (``counting_engine``). The answer is the completion that the user accepts, where
they do, and otherwise some line of the document, which nobody accepts. After each request there is
enough idle time for what the server prepares.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import httpx
import msgspec
import typer

from benchmarks.plugins.clients import (
    Asking,
    Continue,
    LanguageServer,
    Minuet,
    Plugin,
    Sent,
    Tabby,
    Twinny,
    Whole,
    Zed,
)
from benchmarks.plugins.counting_engine import CountingEngine, Counts
from benchmarks.plugins.llama_cpp import LlamaVim, LlamaVscode
from benchmarks.report import publish
from midfill.cli.options import (
    AdapterOption,
    FimTokensOption,
    ModelArgument,
    SnippetsOption,
    WindowOption,
)
from midfill.cli.progress import show_steps
from midfill.config import FimTokens
from midfill.errors import MidfillError, OptionError
from midfill.frontend.prompt_encoder import PromptEncoder, fim_format
from midfill.infill.window import WindowRule
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve, resolve_adapter
from midfill.models.checkpoints.opening import open_model
from midfill.serving.server.app import create_app
from midfill.serving.server.service import ModelService
from midfill_lab.bench.documents import standard_library_documents
from midfill_lab.bench.editing import SESSION_KINDS, Round, edit_session
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption, SectionOption
from midfill_lab.reporting import ResultTable

WHOLE = "whole documents"
_FILES = 3
_MAX_BODY_BYTES = 16_000_000


class PluginsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to replay.

    Attributes:
        sessions: sessions of the editing mix.
        rounds: requests of each.
        shortest, longest: characters of the files that are edited.
        window: characters before and after the caret to show; None takes the model's own rule.
        snippets: characters of snippets to show; likewise.
        seed: all chance follows from it.
    """

    sessions: int = 3
    rounds: int = 600
    shortest: int = 15_000
    longest: int = 60_000
    window: tuple[int, int] | None = None
    snippets: int | None = None
    seed: int = 0


class PluginsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call counted.

    Attributes:
        counts: by plugin, over all sessions.
        model: whose tokenizer and rules were used.
        window: characters before and after the caret that the model was shown.
        snippets: characters of snippets that it was shown, at most.
        options: what was replayed.
    """

    counts: dict[str, Counts]
    model: str
    window: tuple[int, int]
    snippets: int
    options: PluginsOptions


@dataclass(frozen=True, slots=True)
class _Step:
    """A state of an editor, and what the model writes there."""

    round: Round
    answer: str


def plugins_of(checkpoint: Checkpoint) -> Mapping[str, Callable[[], Plugin]]:
    """Return what makes each plugin for a session, by its name."""
    tokenizer = checkpoint.tokenizer
    continue_ = partial(Continue, tokenizer.encode, tokenizer.decode)
    return {
        WHOLE: Whole,
        "midfill lsp": LanguageServer,
        "llama.vim": LlamaVim,
        "llama.vim without chunks": partial(LlamaVim, snippets=False),
        "llama.vscode": LlamaVscode,
        "llama.vscode without chunks": partial(LlamaVscode, snippets=False),
        "minuet-ai": Minuet,
        "Zed": Zed,
        "twinny": Twinny,
        "Tabby": Tabby,
        "Tabby without snippets": partial(Tabby, snippets=False),
        "Continue as qwen2.5-coder": partial(continue_, qwen=True),
        "Continue as another model": partial(continue_, qwen=False),
        "Continue without other files": partial(continue_, qwen=True, snippets=False),
    }


def measure_plugins(
    checkpoint: Checkpoint,
    model: str,
    options: PluginsOptions | None = None,
    *,
    names: Sequence[str] | None = None,
    fim_tokens: FimTokens | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> PluginsReport:
    """Count what sessions compute as each plugin sends them.

    Args:
        checkpoint: its tokenizer and its rules are used, not its weights.
        model: its name.
        options: what to replay.
        names: of the plugins; None replays all.
        fim_tokens: the model's, if they are not known.
        progress: receives which plugin is being replayed.

    Raises:
        MidfillError: the model has no FIM tokens, or refuses a request.
    """
    options = options or PluginsOptions()
    plugins = plugins_of(checkpoint)
    sessions = [_session(options, number) for number in range(options.sessions)]
    rule = None if options.window is None else WindowRule(*options.window)
    format = fim_format(checkpoint, fim_tokens)
    if format is None:
        raise MidfillError(f"{model} has no FIM tokens that are known: name them (--fim-tokens)")
    counts: dict[str, Counts] = {}
    new_encoder = partial(
        PromptEncoder, checkpoint, format, checkpoint.config.context, rule, options.snippets
    )
    for name in names or plugins:
        progress(name)
        total = counts[name] = Counts()
        for session in sessions:
            encoder = new_encoder()
            _add(total, asyncio.run(_replay(plugins[name](), session, checkpoint, encoder)))
    encoder = new_encoder()
    return PluginsReport(
        counts=counts,
        model=model,
        window=(encoder.window.before, encoder.window.after),
        snippets=encoder.snippet_characters,
        options=options,
    )


def _add(total: Counts, counts: Counts) -> None:
    for name in Counts.__struct_fields__:
        setattr(total, name, getattr(total, name) + getattr(counts, name))


def _session(options: PluginsOptions, number: int) -> list[_Step]:
    chance = random.Random(options.seed + number)
    texts = standard_library_documents(
        _FILES,
        seed=chance.randrange(2**32),
        shortest=options.shortest,
        longest=options.longest,
    )
    sources = {f"{place}.py": text for place, text in enumerate(texts)}
    mix = replace(SESSION_KINDS["mix"], opens_lines=True)
    rounds = edit_session(sources, mix, rounds=options.rounds, seed=chance.randrange(2**32))
    return [_Step(edit, edit.shown or _some_line(edit, chance)) for edit in rounds]


def _some_line(edit: Round, chance: random.Random) -> str:
    lines = [line.strip() for line in (edit.prefix + edit.suffix).splitlines() if line.strip()]
    return chance.choice(lines or ["pass"])


async def _replay(
    plugin: Plugin, session: Sequence[_Step], checkpoint: Checkpoint, encoder: PromptEncoder
) -> Counts:
    """Replay a session; return what it computed."""
    engine = CountingEngine(checkpoint.tokenizer)
    service = ModelService("model", engine, checkpoint.tokenizer, encoder, _MAX_BODY_BYTES)
    transport = httpx.ASGITransport(app=create_app(service))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://midfill") as client:
            for step in session:
                asking = plugin.ask(step.round, step.answer)
                response: str | None = None
                while (sent := _next(asking, response)) is not None:
                    engine.answer = sent.answer
                    bodies = await asyncio.gather(
                        *(_post(client, sent) for _ in range(sent.copies))
                    )
                    await service.finish_prefills()
                    response = bodies[0]
    finally:
        service.close()
    return engine.counts


def _next(asking: Asking, response: str | None) -> Sent | None:
    """Return a plugin's next request, given the response to its last one; None after the last."""
    try:
        return next(asking) if response is None else asking.send(response)
    except StopIteration:
        return None


async def _post(client: httpx.AsyncClient, sent: Sent) -> str:
    """Send a request; return the body of the response.

    Raises:
        MidfillError: it is refused.
    """
    content = msgspec.json.encode(sent.body)
    response = await client.post(
        sent.path, content=content, headers={"content-type": "application/json"}
    )
    if response.status_code != 200:
        raise MidfillError(f"{sent.path} answers {response.status_code}: {response.text}")
    return response.text


def plugins_table(report: PluginsReport) -> ResultTable:
    """A row per plugin."""
    whole = report.counts.get(WHOLE)
    before, after = report.window
    options = report.options
    return ResultTable(
        title="Editing sessions as plugins send them: tokens computed",
        rows=[_cells(name, counts, whole) for name, counts in report.counts.items()],
        caption=f"{options.sessions} sessions of {options.rounds} states, files of"
        f" {options.shortest:,} to {options.longest:,} characters; tokens of {report.model}, which"
        f" is shown about {before} characters before the caret and at most {after} after it,"
        f" and {f'at most {report.snippets}' if report.snippets else 'none'} of snippets."
        f" Seed {options.seed}.",
    )


def _cells(name: str, counts: Counts, whole: Counts | None) -> dict[str, str]:
    total = counts.computed_tokens + counts.background_tokens
    reference = None if whole is None else whole.computed_tokens + whole.background_tokens
    mean = counts.prompt_tokens / max(counts.requests, 1)
    return {
        "client": name,
        "requests": f"{counts.requests:,}",
        "prompt tokens, mean": f"{mean:,.0f}",
        "computed on request": f"{counts.computed_tokens:,}",
        "in idle time": f"{counts.background_tokens:,}",
        "all / whole": "" if reference is None else f"{total / reference:.2f}",
    }


OnlyOption = Annotated[
    list[str] | None,
    typer.Option(metavar="CLIENT", help="A client as the table names it; repeatable."),
]
SessionsOption = Annotated[int, typer.Option(min=1, help="How many sessions.")]
RoundsOption = Annotated[int, typer.Option(min=1, help="States of the editor in each session.")]
SeedOption = Annotated[int, typer.Option(help="Of all random choices.")]


def plugins(
    model: ModelArgument = None,
    adapter: AdapterOption = None,
    fim_tokens: FimTokensOption = None,
    window: WindowOption = None,
    snippets: SnippetsOption = None,
    only: OnlyOption = None,
    sessions: SessionsOption = 3,
    rounds: RoundsOption = 600,
    seed: SeedOption = 0,
    json: JsonOption = None,
    docs: DocsOption = None,
    section: SectionOption = "plugins",
) -> None:
    """Count what editing sessions compute as each editor plugin sends them, without the model.

    Every client replays the same sessions through the server's own endpoints: windows, templates,
    snippets, requests made in advance and equal ones are as the plugin sends them. "all / whole"
    compares with a client that sends whole documents and nothing else.
    """
    name = model or DEFAULT_MODEL
    checkpoint = open_model(resolve(name), resolve_adapter(name, adapter))
    known = plugins_of(checkpoint)
    for plugin in only or ():
        if plugin not in known:
            raise OptionError(f"--only {plugin}: there are {', '.join(known)}")
    options = PluginsOptions(
        sessions=sessions, rounds=rounds, window=window, snippets=snippets, seed=seed
    )
    with show_steps("preparing") as progress:
        report = measure_plugins(
            checkpoint, name, options, names=only, fim_tokens=fim_tokens, progress=progress
        )
    publish(report, plugins_table(report), section=section, json=json, docs=docs)
