"""A loaded model for an evaluation; ModelPool: several copies, each in a process of its own."""

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Self

from midfill.errors import MidfillError
from midfill.infill.request import InfillRequest
from midfill.lab.evaluation.model_choice import ModelChoice
from midfill.lab.evaluation.models import Answer, LocalModel, Model, ModelPrompt
from midfill.system.machine import available_threads
from midfill.system.progress import Progress, StageProgress, ignore_progress

_KV_BYTES = 1 << 30  # of each copy: they can't all size it from the free memory
_END_SECONDS = 10.0


@contextmanager
def load_model(choice: ModelChoice, progress: Progress = ignore_progress) -> Iterator[Model]:
    """Load a model; its processes and threads end with the block.

    Raises:
        MidfillError: the model can't be found or loaded.
    """
    if choice.processes == 1:
        with choice.load_copy(progress=progress) as model:
            yield model
        return
    threads = (choice.threads or available_threads()) // choice.processes
    share = replace(choice, threads=max(1, threads), processes=1)
    # This process loads first, so that the others find packed weights.
    with (
        share.load_copy(_KV_BYTES, progress) as first,
        ModelPool(first, share, choice.processes) as pool,
    ):
        yield pool


class ModelPool:
    """Copies of a model that share the work; a context manager, and a ``Model``.

    Prompts of a group go to the same copy, whose prefix cache knows what they have in common.

    Args:
        first: the copy in this process.
        choice: what the other processes load.
        processes: number of copies, ``first`` included.
    """

    remote = False

    def __init__(self, first: LocalModel, choice: ModelChoice, processes: int) -> None:
        self._first = first
        self.format = first.format
        self.description = first.description
        self.fingerprint = first.fingerprint
        self.keeps_tokens = first.keeps_tokens
        spawn = multiprocessing.get_context("spawn")  # a fork would share the engine's threads
        self._connections: list[Connection] = []
        self._processes = []
        for _ in range(1, processes):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(choice, theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(_END_SECONDS)
            if process.is_alive():
                process.kill()

    def answer(
        self, prompts: Sequence[ModelPrompt], max_tokens: int, progress: StageProgress
    ) -> list[Answer]:
        """See ``Model``."""
        shares = split_by_group(prompts, len(self._connections) + 1)
        for connection, share in zip(self._connections, shares[1:], strict=True):
            try:
                connection.send(([prompts[place] for place in share], max_tokens))
            except OSError:
                raise MidfillError(str(_receive(connection))) from None
        answers: dict[int, Answer] = {}
        counts = [0] * len(shares)

        def count(copy: int, done: int) -> None:
            counts[copy] = done
            progress(sum(counts), len(prompts))

        def count_own(done: int, _: int) -> None:
            count(0, done)

        own = [prompts[place] for place in shares[0]]
        answers |= zip(shares[0], self._first.answer(own, max_tokens, count_own), strict=True)
        waiting = {connection: copy for copy, connection in enumerate(self._connections, 1)}
        while waiting:
            for ready in wait(list(waiting)):
                assert isinstance(ready, Connection)
                copy = waiting[ready]
                match _receive(ready):
                    case int(done):
                        count(copy, done)
                    case list(found):
                        answers |= zip(shares[copy], found, strict=True)
                        del waiting[ready]
                    case message:
                        raise MidfillError(str(message))
        return [answers[place] for place in range(len(prompts))]

    def count_computed(self, requests: Sequence[InfillRequest]) -> list[int]:
        """See ``Model``; the first copy counts, since one request finds what the last one left."""
        return self._first.count_computed(requests)


def split_by_group(prompts: Sequence[ModelPrompt], shares: int) -> list[list[int]]:
    """Return the places of the prompts in each share: similar numbers, groups undivided."""
    groups: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        groups.setdefault(prompt.group, []).append(place)
    split: list[list[int]] = [[] for _ in range(shares)]
    for places in sorted(groups.values(), key=len, reverse=True):
        min(split, key=len).extend(places)
    return [sorted(share) for share in split]


def _receive(connection: Connection) -> object:
    """Return what a copy sent: a number of answers so far, all its answers, or an error's text."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return "a process with a copy of the model ended; is there too little memory?"


def _serve(choice: ModelChoice, connection: Connection) -> None:
    """Load a copy and answer prompts until the other end is closed."""
    try:
        with choice.load_copy(_KV_BYTES) as model:
            while True:
                prompts, max_tokens = connection.recv()
                connection.send(_answer(model, prompts, max_tokens, connection))
    except (EOFError, OSError, KeyboardInterrupt):
        return
    except MidfillError as error:  # the model can't be loaded
        connection.send(str(error))


def _answer(
    model: LocalModel, prompts: Sequence[ModelPrompt], max_tokens: int, connection: Connection
) -> list[Answer] | str:
    """Return the answers, or why there are none."""
    try:
        return model.answer(prompts, max_tokens, lambda done, _: connection.send(done))
    except MidfillError as error:
        return str(error)
