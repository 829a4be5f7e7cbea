"""Which server a document goes to."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from midfill.engine.routing import choose, document_key, preference


@dataclass(frozen=True)
class Server:
    """What routing looks at."""

    address: str
    running: int = 0
    slots: int = 8


addresses = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8, unique=True)
documents = st.lists(st.text(max_size=8), min_size=1, max_size=40, unique=True)


def placed(documents: list[str], addresses: list[str]) -> dict[str, str]:
    """Return where idle servers get each document."""
    servers = [Server(address) for address in addresses]
    return {each: choose(each, servers).address for each in documents}  # type: ignore[union-attr]


@given(documents, addresses, st.text(min_size=1, max_size=8))
def test_a_new_server_takes_documents_for_itself_only(
    documents: list[str], addresses: list[str], new: str
) -> None:
    others = [each for each in addresses if each != new]
    if not others:
        return
    before, after = placed(documents, others), placed(documents, [*others, new])
    assert {after[each] for each in documents if before[each] != after[each]} <= {new}


@given(documents, addresses, st.data())
def test_a_lost_server_moves_its_own_documents_only(
    documents: list[str], addresses: list[str], data: st.DataObject
) -> None:
    lost = data.draw(st.sampled_from(addresses))
    left = [each for each in addresses if each != lost]
    if not left:
        return
    before, after = placed(documents, addresses), placed(documents, left)
    assert all(before[each] == lost for each in documents if before[each] != after[each])


@given(documents, addresses)
def test_the_order_in_which_servers_are_named_does_not_matter(
    documents: list[str], addresses: list[str]
) -> None:
    assert placed(documents, addresses) == placed(documents, addresses[::-1])


@given(st.text(max_size=8), st.lists(st.integers(0, 50), min_size=1, max_size=6))
def test_no_server_gets_much_more_than_its_share(document: str, loads: list[int]) -> None:
    servers = [Server(f"server {n}", load, slots=1) for n, load in enumerate(loads)]
    chosen = choose(document, servers)
    assert chosen is not None
    mean = (sum(loads) + 1) / len(loads)
    assert chosen.running < max(1, 1.25 * mean + 1)


def test_a_busy_server_keeps_its_documents_as_long_as_it_has_slots() -> None:
    servers = [Server("a", running=7), Server("b")]
    kept = [f"document {n}" for n in range(20)]
    wanted = {each: preference(each, servers)[0].address for each in kept}
    assert {each: choose(each, servers).address for each in kept} == wanted  # type: ignore[union-attr]
    assert set(wanted.values()) == {"a", "b"}
    full = [Server("a", running=8), Server("b")]
    assert {choose(each, full).address for each in kept} == {"b"}  # type: ignore[union-attr]


def test_documents_are_spread_evenly() -> None:
    servers = [Server(f"http://10.0.0.{n}:8000") for n in range(4)]
    counts = [0] * 4
    for number in range(4000):
        chosen = choose(document_key("key-1", f"document-{number}"), servers)
        assert chosen is not None
        counts[servers.index(chosen)] += 1
    assert min(counts) > 900


@given(st.text(), st.text(), st.text(), st.text())
def test_no_two_documents_have_one_key(one: str, a: str, other: str, b: str) -> None:
    assert (document_key(one, a) == document_key(other, b)) == ((one, a) == (other, b))


def test_without_servers_there_is_none() -> None:
    assert choose("a", list[Server]()) is None
