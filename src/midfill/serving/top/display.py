"""What ``midfill top`` shows of a history, as wide as the terminal is, and its loop."""

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from midfill.serving.top.history import History, ServerGoneError, Snapshot

_UNKNOWN = "-"
_BAR = 24  # columns
_LABEL_WIDTH = len("between tokens")
_COLUMN_WIDTH = 9  # about, of the table of tenants

Read = Callable[[], Snapshot]
_SPAN = 10.0  # seconds that rates and percentiles are of
_REDRAW_SECONDS = 0.5  # until a terminal that has another size is redrawn


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the table of tenants."""

    title: str
    cell: Callable[[History, str], str]


def display(history: History, url: str, width: int, notice: str | None = None) -> RenderableType:
    """Return the whole display.

    Args:
        history: of at least one snapshot.
        url: the server.
        width: columns of the terminal.
        notice: what is wrong at the moment.
    """
    title = Text.assemble(("midfill top", "bold"), "  ", history.last.model, "  ", (url, "dim"))
    title.truncate(width, overflow="ellipsis")
    parts: list[RenderableType] = [title]
    if notice is not None:
        parts.append(Text(notice, "bold red"))
    parts += [Text(), _overview(history, width)]
    tenants = history.last.tenants
    if len(tenants) > 1:
        parts += [Text(), _tenants(history, tenants, width)]
    return Group(*parts)


def _overview(history: History, width: int) -> Table:
    last = history.last
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True, min_width=min(_LABEL_WIDTH, width // 2))
    table.add_column(no_wrap=True, overflow="ellipsis")  # so that every row is seen
    running, waiting = last.value("num_requests_running"), last.value("num_requests_waiting")
    table.add_row(
        "requests",
        f"{running:.0f} running, {waiting:.0f} queued ({last.value('queued_tokens'):,.0f} tokens),"
        f" {last.value('num_requests_background'):.0f} in idle time",
    )
    table.add_row(
        "responses",
        f"{_rate(history.response_rate(lambda status: status < '400'))} good,"
        f" {_rate(history.response_rate(lambda status: status >= '400' and status != '499'))}"
        f" refused or failed, {_rate(history.response_rate(lambda status: status == '499'))}"
        " given up by clients",
    )
    table.add_row(
        "batch",
        f"{_number(history.ratio('computed_tokens_total', 'steps_total'))} tokens per step,"
        f" {_rate(history.rate('steps_total'))} steps,"
        f" engine busy {_percent(history.rate('busy_seconds_total'))}",
    )
    table.add_row("KV", _kv(history, width))
    if last.value("states"):
        table.add_row("states", _states(history))
    hits = history.ratio("prefix_cache_hits_total", "prefix_cache_queries_total")
    table.add_row("prefix cache", f"{_percent(hits)} of prompt tokens found")
    drafts = ("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total")
    table.add_row("drafts", f"{_percent(history.ratio(*drafts))} of drafted tokens right")
    table.add_row(
        "tokens",
        f"{_rate(history.rate('prompt_tokens_total'))} in prompts,"
        f" {_rate(history.rate('generation_tokens_total'))} generated,"
        f" {_rate(history.rate('computed_tokens_total'))} computed",
    )
    table.add_row("queue", _percentiles(history, "request_queue_time_seconds"))
    table.add_row("first token", _percentiles(history, "time_to_first_token_seconds"))
    table.add_row("between tokens", _percentiles(history, "inter_token_latency_seconds"))
    table.add_row(
        "since start",
        f"{last.value('request_success_total'):,.0f} answers,"
        f" {last.value('generation_tokens_total'):,.0f} tokens generated,"
        f" {last.value('num_preemptions_total'):,.0f} preemptions,"
        f" {last.value('engine_restarts_total'):,.0f} restarts of the engine",
    )
    return table


def _kv(history: History, width: int) -> RenderableType:
    last = history.last
    slots, used = last.value("kv_slots"), last.value("kv_cache_usage_perc")
    cached = last.value("kv_slots_cached") / slots if slots else 0.0
    text = f"{_percent(used)} in use, {_percent(cached)} cached, of {slots:,.0f} tokens"
    if width < _BAR + 60:
        return text
    grid = Table.grid(padding=(0, 2))
    grid.add_row(ProgressBar(total=1.0, completed=used, width=_BAR), text)
    return grid


def _states(history: History) -> str:
    """Return what hybrids hold beside KV."""
    last = history.last
    return (
        f"{last.value('states_used'):,.0f} in use, {last.value('state_snapshots'):,.0f} snapshots,"
        f" of {last.value('states'):,.0f};"
        f" snapshots {_rate(history.rate('state_snapshots_reused_total'))} reused,"
        f" {_rate(history.rate('state_snapshots_evicted_total'))} evicted"
    )


def _percentiles(history: History, name: str) -> str:
    values = [_duration(history.percentile(name, share)) for share in (0.5, 0.95, 0.99)]
    return "{} median, {} 95%, {} 99%".format(*values)


def _tenants(history: History, tenants: tuple[str, ...], width: int) -> Table:
    """Return the table of tenants: as many columns, the most important first, as there is room."""
    names = max(map(len, (*tenants, "tenant")))
    room = max((width - names) // (_COLUMN_WIDTH + 2), 2)
    columns = _COLUMNS[:room]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("tenant", no_wrap=True)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for tenant in tenants:
        table.add_row(tenant, *(column.cell(history, tenant) for column in columns))
    return table


def _gauge(name: str) -> Callable[[History, str], str]:
    return lambda history, tenant: f"{history.last.value(name, tenant):.0f}"


def _counter(name: str) -> Callable[[History, str], str]:
    return lambda history, tenant: _rate(history.rate(name, tenant))


def _first_token(share: float) -> Callable[[History, str], str]:
    name = "time_to_first_token_seconds"
    return lambda history, tenant: _duration(history.percentile(name, share, tenant))


_COLUMNS = (
    _Column("running", _gauge("num_requests_running")),
    _Column("queued", _gauge("num_requests_waiting")),
    _Column("generated", _counter("generation_tokens_total")),
    _Column("TTFT 95%", _first_token(0.95)),
    _Column(
        "cached",
        lambda history, tenant: _percent(
            history.ratio("prefix_cache_hits_total", "prefix_cache_queries_total", tenant)
        ),
    ),
    _Column("answers", _counter("request_success_total")),
    _Column("prompt", _counter("prompt_tokens_total")),
    _Column("TTFT 50%", _first_token(0.5)),
)


def _number(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    return f"{value:,.1f}" if 0 < value < 10 else f"{value:,.0f}"


def _rate(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{_number(value)}/s"


def _percent(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{100 * value:.0f}%"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return _UNKNOWN
    return f"{_number(1000 * seconds)} ms" if seconds < 1 else f"{_number(seconds)} s"


def show_once(read: Read, url: str, interval: float, console: Console) -> None:
    """Print the numbers once; rates are of ``interval`` seconds.

    Raises:
        ServerGoneError: no server answers.
    """
    history = History(interval)
    history.add(read())
    time.sleep(interval)
    history.add(read())
    console.print(display(history, url, console.width))


def show_live(read: Read, url: str, interval: float, console: Console) -> None:
    """Show the numbers until the user presses q or Ctrl-C. A server may end and come back.

    Raises:
        ServerGoneError: no server answers at first.
    """
    history = History(_SPAN)
    history.add(read())
    with (
        contextlib.suppress(KeyboardInterrupt),
        _single_keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        notice: str | None = None
        while True:
            live.update(display(history, url, console.width, notice), refresh=True)
            due, size = time.monotonic() + interval, console.size
            while (left := due - time.monotonic()) > 0 and console.size == size:
                if "q" in pressed(min(left, _REDRAW_SECONDS)).lower():
                    return
            if time.monotonic() < due:
                continue
            try:
                snapshot = read()
            except ServerGoneError:
                notice = "the server doesn't answer; these are its last numbers"
                continue
            if notice is not None:  # what comes now may be another process
                notice, history = None, History(_SPAN)
            history.add(snapshot)


@contextlib.contextmanager
def _single_keys() -> Iterator[Callable[[float], str]]:
    """Have each key arrive when it is pressed; yield a function that waits for one.

    The function takes the seconds to wait, and returns what was pressed, "" for nothing. Where
    single keys can't be read, as on Windows or if standard input is no terminal, it only waits.
    """
    try:
        import termios
        import tty

        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (ImportError, OSError, ValueError, termios.error):
        yield _only_wait
        return

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        if not ready:
            return ""
        return os.read(descriptor, 64).decode("ascii", "ignore") or "q"  # the terminal is gone

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _only_wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""
