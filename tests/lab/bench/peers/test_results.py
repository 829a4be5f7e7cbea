"""Figures of servers, their ratios, and files of them."""

from pathlib import Path

import pytest
from peer_reports import peers_report

from midfill.errors import MidfillError
from midfill.lab.bench.peers.results import figure, read_peers, times_faster
from midfill.system.reporting.publish import write_json


def test_medians_with_their_spread() -> None:
    one = figure("rounds", "rounds, 1 user", "wall s", [3.0, 1.0, 7.0], layout="fim")
    assert (one.median, one.lowest, one.highest, one.runs) == (3.0, 1.0, 7.0, 3)


def test_more_tokens_a_second_and_less_time_are_faster() -> None:
    report = peers_report()
    slow, fim, efim = (report.servers[2].figures[i] for i in (0, 1, 2))
    assert times_faster(report, slow) == 4.0
    # The same prompts: midfill was not measured with the peer's other layout.
    assert times_faster(report, fim) == 4.0
    assert times_faster(report, efim) is None
    # Its native figure can be set beside both of the peer's layouts.
    assert times_faster(report, fim, own_layout="native") == 10.0
    assert times_faster(report, efim, own_layout="native") == 2.5
    unknown = figure("prefill", "prefill of 7", "tokens/s", [1.0])
    assert times_faster(report, unknown) is None


def test_a_comparison_can_be_read_again(tmp_path: Path) -> None:
    write_json(tmp_path / "peers.json", peers_report())
    assert read_peers(tmp_path / "peers.json") == peers_report()
    (tmp_path / "peers.json").write_text('{"servers": 3}')
    with pytest.raises(MidfillError, match=r"is no file of 'midfill bench peers'"):
        read_peers(tmp_path / "peers.json")
    with pytest.raises(MidfillError, match=r"none\.json can't be read"):
        read_peers(tmp_path / "none.json")
