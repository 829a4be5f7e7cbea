"""Stand-ins for versions of midfill: packages that note what they are asked.

Their clock is their own: a prompt's token takes 10 ms on it, an answer's 100 ms. With ``scale`` 2
everything is twice as fast.
"""

import subprocess
from pathlib import Path

_PACKAGE = """
import os, time

NAME, SCALE = {name!r}, {scale!r}
now = 0.0

def note(*words):
    with open(os.environ["STAND_IN_LOG"], "a") as log:
        print(NAME, *words, file=log)

def spend(seconds):
    global now
    now += seconds / SCALE

class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos):
        assert temperature == 0.0 and ignore_eos
        self.max_tokens = max_tokens

class Delta:
    def __init__(self, *token_ids):
        self.token_ids = token_ids

class LLM:
    def __init__(self, model, *, threads, speculation):
        assert not speculation
        time.perf_counter = lambda: now
        print("loading", model)
        note("loads", os.path.dirname(__file__))

    def generate(self, prompts, sampling):
        lengths = "+".join(str(len(prompt)) for prompt in prompts)
        note("answers", lengths, sampling.max_tokens, hash(tuple(map(tuple, prompts))))
        spend(0.1 * sampling.max_tokens)

    def generate_stream(self, prompt, sampling):
        note("answers", len(prompt), sampling.max_tokens, hash(tuple(prompt)))
        spend(0.01 * len(prompt))
        yield Delta(1)
        for left in range(sampling.max_tokens - 1, 0, -2):
            spend(0.1 * min(left, 2))
            yield Delta(*[1] * min(left, 2))
"""

_PROGRAM = """
import json, os, sys
from midfill import NAME, SCALE, note
arguments = sys.argv[1:]
note("runs", os.path.dirname(__file__))
if "--fail" in arguments and NAME == "old":
    sys.exit("no such option: --fail")
times = {"first_ttft_seconds": 2.0 / SCALE, "later_ttft_seconds": 0.0}
figures = {"layouts": {"native": {"requests_per_second": 4.0 * SCALE, **times}}}
with open(arguments[arguments.index("--json") + 1], "w") as file:
    json.dump(figures, file)
"""


def git(repository: Path, *arguments: str) -> None:
    """Run git in a repository."""
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    command = ["git", *identity, *arguments]
    subprocess.run(command, cwd=repository, check=True, capture_output=True)


def write_stand_in(source: Path, name: str, scale: float = 1.0) -> Path:
    """Write a package ``midfill`` into a folder and return the package's own."""
    package = source / "midfill"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(_PACKAGE.format(name=name, scale=scale))
    (package / "__main__.py").write_text(_PROGRAM)
    return package


def write_checkout(repository: Path) -> Path:
    """Make a repository with a commit, tagged ``first``, and a working tree twice as fast.

    Returns:
        The package's folder in the working tree.
    """
    repository.mkdir()
    git(repository, "init", "-q")
    write_stand_in(repository / "src", "old")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "first")
    git(repository, "tag", "first")
    return write_stand_in(repository / "src", "new", 2.0)
