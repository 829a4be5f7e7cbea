"""The loads: users who work at once, each sending one request after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from midfill.lab.bench.documents import standard_library_documents
from midfill.lab.bench.edits.sessions import SESSION_KINDS, edit_session
from midfill.lab.bench.rounds import RoundsOptions, payload


@dataclass(frozen=True, slots=True)
class Ask:
    """A request.

    Attributes:
        document: its number.
        body: of /v1/completions.
    """

    document: int
    body: Mapping[str, Any]


Asks = Sequence[Sequence[Ask]]
"""Requests by user, in order."""


_GREEDY = {"temperature": 0}


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent.

    Attributes:
        users: who work at once, each with documents of its own.
        rounds: requests per user of EFIM's rounds load.
        edits: requests per user of a session of the editing mix.
        characters: of a document that are used.
        output_tokens: of each answer.
        seed: chooses the files and the edits.
    """

    users: int = 8
    rounds: int = 4
    edits: int = 12
    characters: int = 3000
    output_tokens: int = 8
    seed: int = 0


def loads(options: ReplicaLoad) -> dict[str, Asks]:
    """Return both loads. Answers are greedy, so that they can be compared."""
    return {"rounds": _rounds(options), "edits": _edits(options)}


def _rounds(options: ReplicaLoad) -> Asks:
    load = RoundsOptions(output_tokens=options.output_tokens)
    texts = standard_library_documents(options.users, seed=options.seed)
    return [
        [
            Ask(user, payload("native", text[: options.characters], number, load, "") | _GREEDY)
            for number in range(1, options.rounds + 1)
        ]
        for user, text in enumerate(texts)
    ]


def _edits(options: ReplicaLoad) -> Asks:
    texts = standard_library_documents(2 * options.users, seed=options.seed + 1)
    common = {"max_tokens": options.output_tokens, "ignore_eos": True, **_GREEDY}
    return [
        [
            Ask(
                2 * user + int(one.document),
                {**common, "prompt": one.prefix, "suffix": one.suffix},
            )
            for one in edit_session(
                {str(name): text[: options.characters] for name, text in enumerate(pair)},
                SESSION_KINDS["mix"],
                rounds=options.edits,
                seed=options.seed + user,
            )
        ]
        for user, pair in enumerate(zip(texts[::2], texts[1::2], strict=True))
    ]
