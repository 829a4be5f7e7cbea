"""A sample of everything that CONTRIBUTING.md says how to add: its files, its entries, its proof.

Each is written as a contributor would, into the files that its recipe names and no others, and has
a program that uses what was added.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "src/midfill"
LAB = "lab/src/midfill_lab"
NAME = "sampled"
KIND = "evict"


@dataclass(frozen=True)
class Entry:
    """Text that is put into a file that is there.

    Attributes:
        file: path from the repository's root.
        text: what is put in.
        before: the text before which it is put, at its first place.
    """

    file: str
    text: str
    before: str


@dataclass(frozen=True)
class Addition:
    """A sample of one kind of addition.

    Attributes:
        files: new files, path from the repository's root -> content.
        entries: where it is registered.
        program: fails unless the addition works. ``tiny`` is the folder of a tiny Llama.
    """

    files: Mapping[str, str]
    entries: tuple[Entry, ...]
    program: str

    @property
    def touched(self) -> set[str]:
        """The files that it writes or changes."""
        return {*self.files, *(entry.file for entry in self.entries)}

    def write(self, root: Path) -> None:
        """Make the addition in a copy of the repository.

        Raises:
            ValueError: a place for an entry is not there.
        """
        for name, text in self.files.items():
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(text, "utf-8")
        for entry in self.entries:
            path = root / entry.file
            head, found, rest = path.read_text("utf-8").partition(entry.before)
            if not found:
                raise ValueError(f"{entry.file} has no {entry.before!r}")
            path.write_text(head + entry.text + found + rest, "utf-8")


_FAMILY = '''"""Sampled: Llama's layers under another name."""

from midfill.models import huggingface_config
from midfill.models.config import ModelConfig
from midfill.models.family import LLAMA_MODULES, ConfigFields, Family


def _from_huggingface(fields: ConfigFields) -> ModelConfig:
    return huggingface_config.read_decoder(fields, "sampled")


FAMILY = Family(
    name="sampled", from_huggingface=_from_huggingface, huggingface_modules=LLAMA_MODULES
)
'''

_SCHEDULER = '''"""LatestFirst: the last to arrive comes first."""

from dataclasses import dataclass

from midfill.engine.scheduling.policies.ordered_admission import QueueOrder, Rank
from midfill.engine.scheduling.scheduler import ScheduleState, WaitingSequence


@dataclass(frozen=True)
class LatestFirst(QueueOrder):
    """Ranks by arrival, the latest first."""

    def rank(self, state: ScheduleState, sequence: WaitingSequence) -> Rank:
        """Return a waiting sequence's rank."""
        return (-sequence.arrived,)
'''

_METHOD = '''"""LastOnly: StreamingLLM without sinks."""

from dataclasses import dataclass

from midfill.methods.evict.streaming_llm import StreamingLLM


@dataclass(frozen=True)
class LastOnly(StreamingLLM):
    """The method's hyper-parameters."""

    sinks: int = 0
'''

_KIND = '''"""SlowKind: prompts that are computed a few tokens at a time."""

from dataclasses import dataclass

from midfill.methods.sequence_method import (
    PlainLengths,
    RequestFacts,
    SequenceMethod,
    SequenceView,
)


@dataclass(frozen=True)
class Slow:
    """The method's hyper-parameters."""

    tokens: int = 3


class SlowSequence(SequenceMethod):
    """One sequence's method."""

    name = title = "slow"

    def __init__(self, method: Slow) -> None:
        self._tokens = method.tokens

    def barrier(self, sequence: SequenceView) -> int | None:
        """Stop after every few tokens of the prompt."""
        end = sequence.computed + self._tokens
        return end if end < sequence.prompt_length else None


class SlowKind(PlainLengths):
    """Puts ``Slow`` to work."""

    def attach(
        self, name: str, method: object, request: RequestFacts, sequence: SequenceView
    ) -> SequenceMethod | None:
        """Return the method of a sequence."""
        return SlowSequence(method) if isinstance(method, Slow) else None
'''

_DIALECT = '''"""Sampled: a client API that asks how long a text is."""

from fastapi import APIRouter

from midfill.serving.server.dialects.dialect import Dialect, TenantOf
from midfill.serving.server.service import ModelService


def routes(service: ModelService, tenant_of: TenantOf) -> APIRouter:
    """Return the router of its endpoint."""
    router = APIRouter()

    @router.get("/sampled/length")
    async def length(text: str) -> int:
        """Count the characters of ``text``."""
        return len(text)

    return router


DIALECT = Dialect(routes=routes)
'''

_ANSWER = """
def answer(**options):
    from midfill import LLM, SamplingParams
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    return LLM(tiny, threads=1, **options).infill("def f(x):\\n    return ", "\\n", params)
"""


ADDITIONS: Mapping[str, Addition] = {
    "a model family": Addition(
        {f"{PACKAGE}/models/{NAME}.py": _FAMILY},
        (
            Entry(f"{PACKAGE}/models/families.py", f"    {NAME},\n", "    starcoder2,\n"),
            Entry(
                f"{PACKAGE}/models/families.py", f"{NAME},\n        ", "gemma3n,\n        gptoss,"
            ),
        ),
        """
import json, pathlib, shutil
from midfill.models.checkpoints.opening import open_checkpoint
folder = pathlib.Path(shutil.copytree(tiny, "sampled-model"))
config = json.loads((folder / "config.json").read_text()) | {"model_type": "sampled"}
(folder / "config.json").write_text(json.dumps(config))
assert open_checkpoint(folder).config.family == "sampled"
""",
    ),
    "a FIM format": Addition(
        {},
        (
            Entry(
                f"{PACKAGE}/infill/formats.py",
                f'    Family(name="{NAME}", prefix="[P]", suffix="[S]", middle="[M]"),\n',
                '    Family(\n        name="codellama"',
            ),
        ),
        """
from midfill.infill.formats import find_format
found = find_format("llama", {"[P]": 1, "[S]": 2, "[M]": 3}, {})
assert found is not None and found.name == "sampled"
""",
    ),
    "a scheduler": Addition(
        {f"{PACKAGE}/engine/scheduling/policies/{NAME}.py": _SCHEDULER},
        (
            Entry(
                f"{PACKAGE}/engine/scheduling/registry.py",
                f'        PolicyEntry("{NAME}", "order", "latest first", "nobody, 2026", '
                f'".{NAME}", "LatestFirst"),\n',
                '        PolicyEntry("sarathi-serve"',
            ),
        ),
        _ANSWER
        + """
from midfill.engine.scheduling.policies.sampled import LatestFirst
assert answer(scheduler="sampled:max_wait=5").usage.completion_tokens == 6
""",
    ),
    "a method": Addition(
        {f"{PACKAGE}/methods/{KIND}/{NAME}.py": _METHOD},
        (
            Entry(
                f"{PACKAGE}/methods/registry.py",
                f'        MethodEntry("{NAME}", "{KIND}", "LastOnly", "nobody, 2026", '
                f'".{KIND}.{NAME}", "LastOnly"),\n',
                '        MethodEntry("cake"',
            ),
        ),
        _ANSWER
        + """
assert answer(method="sampled:budget=8").usage.completion_tokens == 6
""",
    ),
    "a kind of method": Addition(
        {
            f"{PACKAGE}/methods/{NAME}_kind/__init__.py": '"""Prompts that are slow."""\n',
            f"{PACKAGE}/methods/{NAME}_kind/sequence.py": _KIND,
        },
        (
            Entry(
                f"{PACKAGE}/methods/kinds.py",
                f"from midfill.methods.{NAME}_kind.sequence import SlowKind\n",
                "from midfill.methods.sequence_method import",
            ),
            Entry(f"{PACKAGE}/methods/kinds.py", "SlowKind(),\n            ", "*further,"),
            Entry(
                f"{PACKAGE}/methods/registry.py",
                f'    "{NAME}_kind": "takes its time",\n',
                '    "evict": "keeps',
            ),
            Entry(
                f"{PACKAGE}/methods/registry.py",
                f'        MethodEntry("slow", "{NAME}_kind", "Slow", "nobody, 2026", '
                f'".{NAME}_kind.sequence", "Slow"),\n',
                '        MethodEntry("cake"',
            ),
        ),
        _ANSWER
        + """
from midfill.methods.sampled_kind.sequence import SlowSequence
stops, barrier = [], SlowSequence.barrier
SlowSequence.barrier = lambda self, seen: stops.append(seen.computed) or barrier(self, seen)
assert answer(method="slow:tokens=2").text == answer().text and len(set(stops)) > 3
""",
    ),
    "a client's dialect": Addition(
        {f"{PACKAGE}/serving/server/dialects/{NAME}.py": _DIALECT},
        (
            Entry(f"{PACKAGE}/serving/server/app.py", f"    {NAME},\n", "    tabby,\n)"),
            Entry(
                f"{PACKAGE}/serving/server/app.py", f"    {NAME}.DIALECT,\n", "    tabby.DIALECT,\n"
            ),
        ),
        """
from midfill.serving.server.app import DIALECTS
from midfill.serving.server.dialects import sampled
assert sampled.DIALECT in DIALECTS
""",
    ),
    "a benchmark": Addition(
        {
            f"benchmarks/{NAME}.py": '"""A measurement."""\n\nimport typer\n\n\ndef sampled() -> '
            'None:\n    """Measure."""\n    typer.echo("3 ms")\n'
        },
        (
            Entry(
                "benchmarks/__main__.py",
                f'    "{NAME}": "{NAME}",\n',
                '    "shape": "shapes.command",\n',
            ),
        ),
        """
from typer.testing import CliRunner
from benchmarks.__main__ import make_app
assert CliRunner().invoke(make_app("sampled"), ["sampled"]).output == "3 ms\\n"
""",
    ),
    "a model by name": Addition(
        {},
        (
            Entry(
                f"{PACKAGE}/models/checkpoints/model_store.py",
                f'        RegisteredModel("{NAME}", "sampled==1", "00", "sampled.gguf", "00", 1, '
                '"MIT"),\n',
                "        RegisteredModel(\n            name=DEFAULT_MODEL",
            ),
        ),
        """
from typer.testing import CliRunner
from midfill.cli.app import app
assert "sampled" in CliRunner().invoke(app, ["models"]).output
""",
    ),
    "a condition of evaluation": Addition(
        {},
        (
            Entry(
                f"{LAB}/evaluation/conditions.py",
                f'    Condition("{NAME}", "distance", least_increment=7),\n',
                '    Condition("psm", "end"),\n',
            ),
        ),
        """
from midfill_lab.evaluation.conditions import parse_conditions
assert parse_conditions("sampled,psm") == ("sampled", "psm")
""",
    ),
    "a filter of training documents": Addition(
        {},
        (
            Entry(f"{LAB}/training/filters.py", f'    "{NAME}",\n', '    "contaminated",\n'),
            Entry(
                f"{LAB}/training/filters.py",
                f'        if "dull" in text:\n            return text, "{NAME}"\n',
                "        if contains_credential(text):\n",
            ),
        ),
        """
from midfill_lab.training.corpus import Document
from midfill_lab.training.filters import DocumentFilter
text = "".join(f"name_{line} = 'dull'\\n" for line in range(30)).encode()
judged = DocumentFilter()
assert judged.accept(Document("a.py", text, "MIT")) is None
assert judged.refused == {"sampled": 1}
""",
    ),
    "an option of `midfill serve`": Addition(
        {},
        (
            Entry(
                f"{PACKAGE}/serving/options.py",
                f"    {NAME}: Annotated[int, Flag(min=0, help='How many are sampled.')] = 3\n",
                "    document_memory: Annotated[",
            ),
        ),
        """
from unittest import mock
from typer.testing import CliRunner
from midfill.cli.app import app
with mock.patch("midfill.serving.server.startup.run_server") as run:
    done = CliRunner().invoke(app, ["serve", tiny, "--sampled", "5"])
assert done.exit_code == 0, done.output
assert run.call_args.args[0].sampled == 5
assert "--sampled" in CliRunner().invoke(app, ["serve", "--help"]).output
""",
    ),
    "a command": Addition(
        {
            f"{PACKAGE}/cli/{NAME}.py": '"""``midfill sampled``."""\n\nimport typer\n\n\ndef '
            'sampled() -> None:\n    """Say hello."""\n    typer.echo("hello")\n'
        },
        (
            Entry(
                f"{PACKAGE}/cli/app.py",
                f"from midfill.cli.{NAME} import {NAME}\n",
                "from midfill.cli.serve import",
            ),
            Entry(f"{PACKAGE}/cli/app.py", f"{NAME}, ", "gateway, complete, lsp"),
        ),
        """
from typer.testing import CliRunner
from midfill.cli.app import app
assert CliRunner().invoke(app, ["sampled"]).output == "hello\\n"
""",
    ),
}
"""The rows of CONTRIBUTING.md's table, each with a sample."""
