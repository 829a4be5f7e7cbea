"""The ``midfill`` command with its subcommands."""

from midfill.cli.batch import batch
from midfill.cli.cluster import app as cluster
from midfill.cli.complete import complete
from midfill.cli.extensions import add_extensions
from midfill.cli.gateway import gateway
from midfill.cli.generate import generate
from midfill.cli.keys import app as keys
from midfill.cli.lsp import lsp
from midfill.cli.methods import app as methods
from midfill.cli.pull import models, pull
from midfill.cli.serve import serve
from midfill.cli.top import top
from midfill.cli.usage import GroupedHelp, root_app

app = root_app(
    "An LLM server for infilling: it computes only what an edit changed.",
    epilog="Start with: midfill serve (downloads a small model the first time).",
)
for command in (serve, batch):
    app.command(cls=GroupedHelp)(command)
for command in (gateway, complete, lsp, top, generate, pull, models):
    app.command()(command)

app.add_typer(cluster, name="cluster")
app.add_typer(methods, name="methods")
app.add_typer(keys, name="keys")
add_extensions({"": app, "methods": methods})
