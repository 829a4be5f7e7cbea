"""Every number of threads takes its turn, alone and beside a busy process."""

import os
import threading
from pathlib import Path

import pytest
from tiny_checkpoints import write_tiny

from benchmarks.cores import (
    LOADS,
    CoresReport,
    Setting,
    SettingRates,
    cores_table,
    measure_cores,
    pinned,
    settings_for,
)
from midfill.system.machine import describe_machine


@pytest.mark.parametrize(("cores", "threads"), [(1, [1, 2]), (2, [1, 2, 4]), (6, [1, 2, 4, 6, 12])])
def test_threads_grow_to_twice_the_cores(cores: int, threads: list[int]) -> None:
    settings = settings_for(cores)
    assert sorted({each.threads for each in settings}) == threads
    assert {str(each) for each in settings if each.busy} < {
        str(each) for each in settings if not each.busy
    }
    assert len(set(settings)) == len(settings)


def test_a_fair_system_gives_each_thread_as_much_as_any_other() -> None:
    assert Setting(2, busy=1).fair_share(2) == pytest.approx(2 / 3)
    assert Setting(1, busy=1).fair_share(2) == 1.0
    assert Setting(1, busy=1).fair_share(1) == pytest.approx(1 / 2)
    assert Setting(4).fair_share(2) == 1.0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system pins no threads")
def test_pinned_threads_are_free_again_afterwards() -> None:
    own, every = threading.get_native_id(), os.sched_getaffinity(0)
    with pinned([own]):
        assert len(os.sched_getaffinity(own)) == 1
    assert os.sched_getaffinity(own) == every


def test_each_setting_runs_every_load_in_every_round(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path, max_position_embeddings=1024)
    report = measure_cores(str(folder), rounds=1)
    settings = settings_for(describe_machine().cores)
    assert [(each.name, each.busy) for each in report.settings] == [
        (str(setting), setting.busy) for setting in settings
    ]
    for each in report.settings:
        assert [len(rates) for rates in each.rates] == [len(LOADS)]
        assert min(each.rates[0]) > 0


def test_the_table_says_what_is_kept_of_the_speed_alone() -> None:
    alone = SettingRates(name="2 threads", busy=0, fair_share=1.0, rates=[[100.0] * 3, [200.0] * 3])
    crowded = SettingRates(
        name="2 threads", busy=1, fair_share=2 / 3, rates=[[50.0] * 3, [100.0] * 3]
    )
    report = CoresReport(
        model="tiny", machine=describe_machine(), rounds=2, settings=[alone, crowded]
    )
    first, second = cores_table(report).rows
    assert first["decode, 1 stream"] == "150 (100\N{EN DASH}200)"
    assert second["decode, 1 stream"] == "75 (50\N{EN DASH}100), 50%"
    assert (first["fair"], second["fair"]) == ("", "67%")
