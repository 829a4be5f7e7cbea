"""Superseding: a newer request of a document ends older ones that its client no longer needs.

Only requests whose client has marked them take part, by a name that it gives the document. A
dialect passes it to ``ModelService.generate``. A request for the same text never ends another,
since some clients send each request several times.
"""

from weakref import WeakSet, WeakValueDictionary

from midfill.serving.server.generation import Generation


class Superseding:
    """The marked requests of all tenants, as long as anybody holds them."""

    def __init__(self) -> None:
        self._groups: WeakValueDictionary[tuple[str, str], _Group] = WeakValueDictionary()

    def enter(self, generation: Generation, tenant: str, document: str) -> None:
        """End the older requests of a document whose text differs, and remember this one."""
        group = self._groups.get((tenant, document)) or _Group()
        self._groups[tenant, document] = group
        for older in tuple(group.generations):
            if older.texts != generation.texts:
                older.supersede()
        group.generations.add(generation)
        generation.group = group


class _Group:
    """The requests of one document; each of them keeps it alive."""

    def __init__(self) -> None:
        self.generations: WeakSet[Generation] = WeakSet()
