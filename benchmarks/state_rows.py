"""What keystrokes compute in models with states: with snapshots, with whole blocks, with plain KV.

Editing sessions go through the real planner and a real engine, whose runner computes nothing: how
many rows a request runs depends on its tokens and the cache alone, not on the model. Beside it
stands what the same requests would run where a cached prefix counts in whole blocks only, as in
vLLM, which aligns the blocks of hybrids to their states.
"""

from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
import numpy as np
import typer

from benchmarks.report import publish
from midfill.arrays import Float32Array
from midfill.cli.progress import show_steps
from midfill.config import ModelOptions
from midfill.engine.engine import Engine, EngineOptions
from midfill.engine.loading import scheduler_policy
from midfill.engine.request import EngineRequest
from midfill.frontend.prompt_encoder import PromptEncoder, fim_format
from midfill.frontend.sampling import SamplingParams
from midfill.infill.request import InfillRequest
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve, resolve_adapter
from midfill.models.checkpoints.opening import open_model
from midfill.models.config import ModelConfig
from midfill.runners.cpu.logits import NUMPY_LOGITS
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.cells import CellLayout
from midfill_lab.bench.documents import standard_library_documents
from midfill_lab.bench.editing import SESSION_KINDS, Round, edit_session
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

BLOCK = 528
"""Tokens of a block: vLLM's for Granite 4.0-H."""
_SLOTS, _CONTEXT, _ANSWER = 100_000, 8192, 1
_SHORTEST, _LONGEST, _FILES = 2000, 3000, 2


class SessionRows(msgspec.Struct, frozen=True, kw_only=True):
    """A session's requests.

    Attributes:
        kind: of the session.
        tokens: of each prompt.
        plain: rows that each runs with KV alone, which can be cut anywhere; where an answer has to
            begin with the last word again, some are its own.
        states: by the number of states, rows with snapshots.
    """

    kind: str
    tokens: list[int]
    plain: list[int]
    states: dict[int, list[int]]

    @property
    def blocks(self) -> list[int]:
        """Rows where cached tokens count in whole blocks."""
        pairs = zip(self.tokens, self.plain, strict=True)
        return [tokens - max(tokens - rows, 0) // BLOCK * BLOCK for tokens, rows in pairs]


class StateRowsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call counted."""

    requests: int
    sessions: list[SessionRows]


class _States:
    """Room for states that nobody computes; implements kv.state_pool.StateStore."""

    nbytes = 0

    def __init__(self, count: int) -> None:
        self.count = count

    def clear(self, state: int) -> None:
        """See ``StateStore.clear``."""

    def copy(self, source: int, target: int) -> None:
        """See ``StateStore.copy``."""


class _Cells:
    """No KV, of which only the layout is asked for."""

    layout = CellLayout("f32", (4, 4))


class IdleRunner:
    """A runner that computes nothing; implements what the engine asks of a ``Runner``.

    Args:
        states: how many; 0 for a model without.
    """

    logits_ops = NUMPY_LOGITS
    description = build = "idle"
    weight_bytes = kv_bytes = 0
    slots = _SLOTS
    cells = _Cells()

    def __init__(self, states: int, vocab: int) -> None:
        self.config = ModelConfig("idle", 1, 16, 1, 1, 16, 16, vocab, _CONTEXT)
        self.states = _States(states) if states else None

    def forward(self, batch: ForwardBatch) -> Float32Array:
        """Return logits of zeros [outputs, vocab]."""
        return np.zeros((len(batch.logit_rows), self.config.vocab), np.float32)

    def argmax_tokens(self, logits: Float32Array) -> list[int]:
        """Return the first token of each row."""
        return [0] * len(logits)


def measure_state_rows(
    checkpoint: Checkpoint,
    *,
    rounds: int = 300,
    states: Sequence[int] = (16, 64),
    kinds: Sequence[str] = tuple(SESSION_KINDS),
    progress: Callable[[str], None] = lambda _: None,
) -> StateRowsReport:
    """Count the rows of editing sessions over files of the standard library.

    Args:
        checkpoint: of the tokenizer and the FIM tokens.
        rounds: requests of a session.
        states: numbers of states.
        kinds: of sessions.
        progress: receives what is being done.
    """
    texts = standard_library_documents(_FILES, shortest=_SHORTEST, longest=_LONGEST)
    files = {f"{number}.py": text for number, text in enumerate(texts)}
    sessions = []
    for kind in kinds:
        progress(kind)
        session = edit_session(files, SESSION_KINDS[kind], rounds=rounds, seed=1)
        requests = _requests(checkpoint, session)
        sessions.append(
            SessionRows(
                kind=kind,
                tokens=[len(request.token_ids) for request in requests],
                plain=_rows(checkpoint, requests, 0),
                states={count: _rows(checkpoint, requests, count) for count in states},
            )
        )
    return StateRowsReport(requests=rounds, sessions=sessions)


def _requests(checkpoint: Checkpoint, session: Sequence[Round]) -> list[EngineRequest]:
    encoder = PromptEncoder(checkpoint, fim_format(checkpoint), _CONTEXT)
    sampling = SamplingParams(temperature=0.0, max_tokens=_ANSWER, ignore_eos=True)
    asked = (
        InfillRequest(prefix=each.prefix, suffix=each.suffix, document=each.document)
        for each in session
    )
    return [encoder.infill(one).request(f"{n}", sampling) for n, one in enumerate(asked)]


def _rows(checkpoint: Checkpoint, requests: Sequence[EngineRequest], states: int) -> list[int]:
    """Return how many rows each request runs, one after the other; 0 states are plain KV."""
    runner = IdleRunner(states, checkpoint.config.vocab)
    options = ModelOptions(max_running=2)
    engine = Engine(
        runner,  # type: ignore[arg-type]
        (),
        EngineOptions(max_running=options.max_running),
        policy=scheduler_policy(options, runner.config.layers),
        token_bytes=checkpoint.tokenizer.token_bytes,
    )
    rows, before = [], 0
    for request in requests:
        engine.add(request)
        while engine.has_work():
            engine.step()
        computed = engine.stats().computed_tokens
        rows.append(computed - before)
        before = computed
    return rows


def state_rows_table(report: StateRowsReport) -> ResultTable:
    """A row per session."""

    def described(rows: Sequence[int]) -> str:
        return f"{np.median(rows):.0f} ({np.mean(rows):.0f})"

    def near(session: SessionRows, rows: Sequence[int]) -> str:
        more = np.array(rows) - np.array(session.plain)
        return f"{np.mean(more <= 64):.1%}"

    rows = []
    for session in report.sessions:
        row = {"session": session.kind, "prompt": f"{np.median(session.tokens):.0f}"}
        row["plain KV"] = described(session.plain)
        for count, counted in session.states.items():
            row[f"{count} states"] = described(counted)
            row[f"{count} states, at most 64 more"] = near(session, counted)
        row[f"blocks of {BLOCK}"] = described(session.blocks)
        rows.append(row)
    return ResultTable(
        title="Rows that a request of an editor computes in a model with states",
        rows=rows,
        caption=f"{report.requests} requests per session over two files of the standard library,"
        " through the planner, tokens of smollm2-135m, no prompts computed in idle time; prompt"
        " tokens, and rows per request, medians (means). The share of requests that compute at"
        " most 64 rows more than with plain KV, which models with states can't have.",
    )


def state_rows(
    rounds: Annotated[int, typer.Option(min=2, help="Requests per session.")] = 300,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Count what keystrokes compute in models with states, beside blocks and plain KV."""
    with show_steps("loading") as progress:
        model = resolve(DEFAULT_MODEL)
        checkpoint = open_model(model, resolve_adapter(DEFAULT_MODEL, None))
        report = measure_state_rows(checkpoint, rounds=rounds, progress=progress)
    publish(report, state_rows_table(report), section="state-rows", json=json, docs=docs)
