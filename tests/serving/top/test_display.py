"""What ``midfill top`` shows of a history. In front of a server: test_top.py."""

from rich.console import Console

from midfill.serving.top.display import display
from midfill.serving.top.history import History, Snapshot


def shown(values: dict[str, float], later: dict[str, float]) -> str:
    history = History(10.0)
    for time, numbers in ((0.0, values), (2.0, values | later)):
        history.add(
            Snapshot(time, "tiny", ("",), {(name, ""): each for name, each in numbers.items()})
        )
    console = Console(width=120)
    with console.capture() as capture:
        console.print(display(history, "http://127.0.0.1:1", console.width))
    return capture.get()


def test_states_of_hybrids_have_a_line() -> None:
    states = {"states": 64.0, "states_used": 3.0, "state_snapshots": 20.0}
    counters = {"state_snapshots_reused_total": 5.0, "state_snapshots_evicted_total": 1.0}
    later = {"state_snapshots_reused_total": 9.0}
    lines = [line.split(maxsplit=1) for line in shown(states | counters, later).splitlines()]
    (line,) = (rest for name, rest in filter(None, lines) if name == "states")
    assert line.strip() == "3 in use, 20 snapshots, of 64; snapshots 2.0/s reused, 0/s evicted"


def test_a_model_without_states_has_no_such_line() -> None:
    assert "states" not in shown({"kv_slots": 100.0}, {})
