"""What a model says about its cuts: read from every kind of folder, checked, written."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from midfill.errors import CheckpointError, MidfillError
from midfill.frontend.prompt_encoder import PromptEncoder, fim_format, fingerprint_of
from midfill.frontend.sampling import SamplingParams
from midfill.infill.context_files import DEFAULT_SNIPPET_CHARACTERS
from midfill.infill.prefix_cut import DEFAULT_RULE, CutRule
from midfill.infill.request import InfillRequest
from midfill.infill.window import DEFAULT_WINDOW, WindowRule
from midfill.models.checkpoints.adapter import read_record
from midfill.models.checkpoints.checkpoint import (
    EMPTY_THRESHOLD_KEY,
    END_BIAS_KEY,
    LEAST_INCREMENT_KEY,
    WINDOW_AFTER_KEY,
    WINDOW_BEFORE_KEY,
)
from midfill.models.checkpoints.model_record import (
    cut_rule_of,
    empty_threshold_of,
    end_bias_of,
    raw_bos_of,
    reuse_method_of,
    snippet_characters_of,
    window_rule_of,
    write_cut,
    write_empty,
    write_reuse,
    write_snippets,
    write_window,
)
from midfill.models.checkpoints.opening import open_checkpoint

NONSENSE = [-1, 100_001, 10**40, "400", 4.5, True, None, [400], {}]


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model's folder."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def write(folder: Path, record: Any) -> None:
    (folder / "midfill.json").write_text(json.dumps(record))


def test_a_model_that_says_nothing_gets_the_default(folder: Path) -> None:
    assert cut_rule_of(open_checkpoint(folder)) == DEFAULT_RULE
    write(folder, {"format": 1, "cut": {"measured": {}}})
    assert cut_rule_of(open_checkpoint(folder)) == DEFAULT_RULE


@pytest.mark.parametrize("least", [0, 96, 100_000])
def test_a_models_own_number_reaches_the_planner(folder: Path, least: int) -> None:
    write(folder, {"cut": {"least_increment": least}})
    checkpoint = open_checkpoint(folder)
    assert cut_rule_of(checkpoint) == CutRule(least)
    prompts = PromptEncoder(checkpoint, fim_format(checkpoint), 4000)
    prefix = "a = 1\n" * 200
    report = prompts.infill(InfillRequest(prefix=prefix, suffix="b\n")).report
    assert report is not None
    assert report.cut is not None
    assert max(0, len(prefix) - least - 12) <= report.cut <= max(0, len(prefix) - least)


@pytest.mark.parametrize("value", NONSENSE)
def test_nonsense_is_one_error_that_names_file_and_field(folder: Path, value: object) -> None:
    write(folder, {"cut": {"least_increment": value}})
    with pytest.raises(
        CheckpointError, match=r"midfill\.json: 'cut\.least_increment' must be"
    ) as error:
        open_checkpoint(folder)
    assert len(str(error.value).replace(str(folder), "")) < 160


@pytest.mark.parametrize("cut", [400, None, [], "400"])
def test_a_section_of_the_wrong_kind_is_an_error(folder: Path, cut: object) -> None:
    write(folder, {"cut": cut})
    with pytest.raises(CheckpointError, match=r"midfill\.json: 'cut' must be an object"):
        open_checkpoint(folder)


@pytest.mark.parametrize("value", NONSENSE)
def test_nonsense_in_a_checkpoints_own_metadata_is_named_too(folder: Path, value: object) -> None:
    """As a GGUF file may hold it."""
    checkpoint = open_checkpoint(folder)
    checkpoint.metadata = {**checkpoint.metadata, LEAST_INCREMENT_KEY: value}
    with pytest.raises(CheckpointError, match=r"model: 'midfill\.least_increment' must be"):
        PromptEncoder(checkpoint, fim_format(checkpoint), 100)


def test_an_adapters_record_is_read_and_checked(folder: Path, tmp_path: Path) -> None:
    base, path = open_checkpoint(folder), tmp_path / "midfill.json"
    path.write_text(json.dumps({"format": 1, "cut": {"least_increment": 200}}))
    assert read_record(path, base).needs == {LEAST_INCREMENT_KEY: 200}
    path.write_text(json.dumps({"format": 1}))
    assert read_record(path, base).needs == {}
    path.write_text(json.dumps({"format": 1, "cut": {"least_increment": -5}}))
    with pytest.raises(CheckpointError, match=r"'cut\.least_increment' must be"):
        read_record(path, base)


class TestSnippets:
    def test_a_model_that_says_nothing_gets_the_default(self, folder: Path) -> None:
        assert snippet_characters_of(open_checkpoint(folder)) == DEFAULT_SNIPPET_CHARACTERS

    def test_a_models_own_number_reaches_the_encoder(self, folder: Path) -> None:
        write(folder, {"snippets": {"characters": 0}})
        checkpoint = open_checkpoint(folder)
        assert PromptEncoder(checkpoint, None, 512).snippet_characters == 0
        asked = PromptEncoder(checkpoint, None, 512, snippet_characters=90)
        assert asked.snippet_characters == 90

    @pytest.mark.parametrize("value", [-1, 4_000_001, "400", 4.5, True, None])
    def test_nonsense_is_one_error_that_names_file_and_field(
        self, folder: Path, value: object
    ) -> None:
        write(folder, {"snippets": {"characters": value}})
        match = r"midfill\.json: 'snippets\.characters' must be"
        with pytest.raises(CheckpointError, match=match):
            open_checkpoint(folder)

    @pytest.mark.parametrize("section", [400, None, []])
    def test_a_section_of_the_wrong_kind_is_an_error(self, folder: Path, section: object) -> None:
        write(folder, {"snippets": section})
        with pytest.raises(CheckpointError, match=r"'snippets' must be an object"):
            open_checkpoint(folder)

    def test_what_is_written_is_read(self, folder: Path) -> None:
        write_snippets(folder, 900, {"date": "2026-01-01"})
        assert snippet_characters_of(open_checkpoint(folder)) == 900


class TestWindow:
    def test_a_model_that_says_nothing_gets_the_default(self, folder: Path) -> None:
        assert window_rule_of(open_checkpoint(folder)) == DEFAULT_WINDOW

    def test_a_models_own_window_reaches_the_encoder(self, folder: Path) -> None:
        write(folder, {"window": {"before": 90, "after": 0}})
        checkpoint = open_checkpoint(folder)
        assert PromptEncoder(checkpoint, None, 512).window == WindowRule(before=90, after=0)
        asked = WindowRule(before=50, after=5)
        assert PromptEncoder(checkpoint, None, 512, asked).window == asked

    @pytest.mark.parametrize("value", [-1, 4_000_001, 10**40, "400", 4.5, True, None, [400], {}])
    def test_nonsense_is_one_error_that_names_file_and_field(
        self, folder: Path, value: object
    ) -> None:
        write(folder, {"window": {"before": value, "after": 30}})
        with pytest.raises(CheckpointError, match=r"midfill\.json: 'window\.before' must be"):
            open_checkpoint(folder)

    @pytest.mark.parametrize("window", [1200, None, [], {}, {"before": 5}])
    def test_a_section_of_the_wrong_kind_is_an_error(self, folder: Path, window: object) -> None:
        write(folder, {"window": window})
        with pytest.raises(CheckpointError, match=r"midfill\.json: 'window' must be an object"):
            open_checkpoint(folder)

    @pytest.mark.parametrize("key", [WINDOW_BEFORE_KEY, WINDOW_AFTER_KEY])
    def test_nonsense_in_a_checkpoints_own_metadata_is_named_too(
        self, folder: Path, key: str
    ) -> None:
        checkpoint = open_checkpoint(folder)
        checkpoint.metadata = {**checkpoint.metadata, key: -1}
        with pytest.raises(CheckpointError, match=f"model: '{key}' must be"):
            window_rule_of(checkpoint)

    def test_what_is_written_is_read_and_the_rest_is_kept(self, folder: Path) -> None:
        write_cut(folder, 320, {})
        path = write_window(folder, WindowRule(90, 30), {"date": "2026-01-01"})
        assert json.loads(path.read_text())["window"]["measured"] == {"date": "2026-01-01"}
        assert window_rule_of(open_checkpoint(folder)) == WindowRule(90, 30)
        assert cut_rule_of(open_checkpoint(folder)) == CutRule(320)


def test_what_is_written_is_read_and_the_rest_is_kept(folder: Path) -> None:
    write(folder, {"format": 1, "training": {"hours": 2}})
    path = write_cut(folder, 320, {"date": "2026-01-01"})
    assert json.loads(path.read_text()) == {
        "format": 1,
        "training": {"hours": 2},
        "cut": {"least_increment": 320, "measured": {"date": "2026-01-01"}},
    }
    assert cut_rule_of(open_checkpoint(folder)) == CutRule(320)
    (folder / "midfill.json").unlink()
    write_cut(folder, 64, {})
    assert cut_rule_of(open_checkpoint(folder)) == CutRule(64)


def test_only_folders_of_models_and_adapters_are_written_to(tmp_path: Path) -> None:
    with pytest.raises(MidfillError, match=r"neither an adapter's nor a Hugging Face model's"):
        write_cut(tmp_path, 400, {})
    assert not list(tmp_path.iterdir())


def test_the_end_tokens_bias_reaches_the_engine(folder: Path) -> None:
    write(folder, {"end": {"logit_bias": 2.5}})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.metadata[END_BIAS_KEY] == end_bias_of(checkpoint) == 2.5
    prompts = PromptEncoder(checkpoint, fim_format(checkpoint), 4000)
    prompt = prompts.infill(InfillRequest(prefix="a = ", suffix="\nb\n"))
    ends = prompt.stop_token_ids
    assert ends
    biased = prompt.request("1", SamplingParams()).sampling.logit_bias
    assert biased == dict.fromkeys(ends, 2.5)
    own = SamplingParams(logit_bias={ends[0]: -1.0, 7: 3.0})
    biased = prompt.request("2", own).sampling.logit_bias
    assert biased == {**dict.fromkeys(ends, 2.5), ends[0]: -1.0, 7: 3.0}
    assert prompt.request("3", SamplingParams(ignore_eos=True)).sampling.logit_bias == {}


def test_raw_prompts_and_models_that_say_nothing_have_no_bias(folder: Path) -> None:
    request = InfillRequest(prefix="a = ", suffix="\nb\n")
    checkpoint = open_checkpoint(folder)
    assert end_bias_of(checkpoint) == 0.0
    prompt = PromptEncoder(checkpoint, fim_format(checkpoint), 4000).infill(request)
    assert prompt.request("1", SamplingParams()).sampling.logit_bias == {}
    write(folder, {"end": {"logit_bias": 2.5}})
    checkpoint = open_checkpoint(folder)
    raw = PromptEncoder(checkpoint, fim_format(checkpoint), 4000).raw("a = ")
    assert raw.request("1", SamplingParams()).sampling.logit_bias == {}


def test_raw_prompts_begin_with_the_token_that_a_model_names(folder: Path) -> None:
    tokenizer = open_checkpoint(folder).tokenizer
    name, token = next(iter(tokenizer.special_tokens.items()))
    request = InfillRequest(prefix="a = ", suffix="\nb\n")
    for record, bos in (({}, None), ({"raw_prompt": {"bos": name}}, token)):
        write(folder, record)
        checkpoint = open_checkpoint(folder)
        prompts = PromptEncoder(checkpoint, fim_format(checkpoint), 4000)
        assert prompts.raw_bos == bos
        begun = [] if bos is None else [bos]
        assert list(prompts.raw("a = ").token_ids) == [*begun, *tokenizer.encode("a = ")]
        assert token != prompts.infill(request).token_ids[0]


@pytest.mark.parametrize("bos", ["", 0, None, ["<s>"]])
def test_a_nonsense_token_is_one_error(folder: Path, bos: object) -> None:
    write(folder, {"raw_prompt": {"bos": bos}})
    with pytest.raises(CheckpointError, match=r"'raw_prompt\.bos' must be the text of a token"):
        open_checkpoint(folder)


def test_a_token_that_the_model_lacks_is_one_error(folder: Path) -> None:
    write(folder, {"raw_prompt": {"bos": "<nowhere>"}})
    with pytest.raises(CheckpointError, match='the model has no token "<nowhere>"'):
        raw_bos_of(open_checkpoint(folder))


@pytest.mark.parametrize("value", ["2", None, True, 101, -1e9, float("nan"), [1]])
def test_a_nonsense_bias_is_one_error(folder: Path, value: object) -> None:
    write(folder, {"end": {"logit_bias": value}})
    with pytest.raises(CheckpointError, match=r"midfill\.json: 'end\.logit_bias' must be a number"):
        open_checkpoint(folder)


@pytest.mark.parametrize("end", [3, {}, {"bias": 1}])
def test_an_end_without_a_bias_is_one_error(folder: Path, end: object) -> None:
    write(folder, {"end": end})
    with pytest.raises(CheckpointError, match="'end' must be an object with 'logit_bias'"):
        open_checkpoint(folder)


class TestEmptyThreshold:
    @pytest.mark.parametrize("threshold", [0, 0.15, 1])
    def test_a_models_own_reaches_the_engine(self, folder: Path, threshold: float) -> None:
        write(folder, {"empty": {"threshold": threshold}})
        checkpoint = open_checkpoint(folder)
        assert checkpoint.metadata[EMPTY_THRESHOLD_KEY] == empty_threshold_of(checkpoint)
        prompts = PromptEncoder(checkpoint, fim_format(checkpoint), 4000)
        prompt = prompts.infill(InfillRequest(prefix="a = ", suffix="\nb\n"))
        assert prompt.request("1", SamplingParams()).empty_threshold == threshold

    def test_a_model_that_says_nothing_has_none(self, folder: Path) -> None:
        checkpoint = open_checkpoint(folder)
        assert empty_threshold_of(checkpoint) == 0.0
        prompts = PromptEncoder(checkpoint, fim_format(checkpoint), 4000)
        prompt = prompts.infill(InfillRequest(prefix="a = ", suffix="\nb\n"))
        assert prompt.request("1", SamplingParams()).empty_threshold == 0.0

    def test_it_is_a_part_of_what_decides_a_models_answers(self, folder: Path) -> None:
        found = []
        for threshold in (0, 0.1, 0.2):
            write(folder, {"empty": {"threshold": threshold}})
            found.append(fingerprint_of(open_checkpoint(folder)))
        (folder / "midfill.json").unlink()
        assert len(set(found)) == 3
        assert fingerprint_of(open_checkpoint(folder)) == found[0]

    @pytest.mark.parametrize("value", ["0.1", None, True, -0.1, 1.01, float("nan"), [1]])
    def test_nonsense_is_one_error_that_names_file_and_field(
        self, folder: Path, value: object
    ) -> None:
        write(folder, {"empty": {"threshold": value}})
        with pytest.raises(
            CheckpointError, match=r"midfill\.json: 'empty\.threshold' must be a number from 0 to 1"
        ):
            open_checkpoint(folder)

    @pytest.mark.parametrize("empty", [0.1, None, {}, {"measured": {}}])
    def test_a_section_of_the_wrong_kind_is_an_error(self, folder: Path, empty: object) -> None:
        write(folder, {"empty": empty})
        with pytest.raises(CheckpointError, match="'empty' must be an object with 'threshold'"):
            open_checkpoint(folder)

    def test_nonsense_in_a_checkpoints_own_metadata_is_named_too(self, folder: Path) -> None:
        checkpoint = open_checkpoint(folder)
        checkpoint.metadata = {**checkpoint.metadata, EMPTY_THRESHOLD_KEY: 2}
        with pytest.raises(CheckpointError, match=r"model: 'midfill\.empty_threshold' must be"):
            PromptEncoder(checkpoint, None, 100)

    def test_what_is_written_is_read_and_the_rest_is_kept(self, folder: Path) -> None:
        write_cut(folder, 320, {})
        path = write_empty(folder, 0.15, {"date": "2026-01-01"})
        assert json.loads(path.read_text())["empty"]["measured"] == {"date": "2026-01-01"}
        assert empty_threshold_of(open_checkpoint(folder)) == 0.15
        assert cut_rule_of(open_checkpoint(folder)) == CutRule(320)

    def test_an_adapters_record_is_read_and_checked(self, folder: Path, tmp_path: Path) -> None:
        base, path = open_checkpoint(folder), tmp_path / "midfill.json"
        path.write_text(json.dumps({"format": 1, "empty": {"threshold": 0.2}}))
        assert read_record(path, base).needs == {EMPTY_THRESHOLD_KEY: 0.2}
        path.write_text(json.dumps({"format": 1}))
        assert read_record(path, base).needs == {}


class TestOpenedLines:
    REQUEST = InfillRequest(prefix="a\n", suffix="b\n")

    @pytest.mark.parametrize("opens", [True, False])
    def test_a_models_own_rule_reaches_its_prompts(self, folder: Path, opens: bool) -> None:
        write(folder, {"line_start": {"opens_line": opens}})
        checkpoint = open_checkpoint(folder)
        prompts = PromptEncoder(checkpoint, fim_format(checkpoint), 4000)
        assert prompts.infill(self.REQUEST).line_break == ("\n" if opens else "")

    def test_a_model_that_says_nothing_opens_none(self, folder: Path) -> None:
        checkpoint = open_checkpoint(folder)
        prompts = PromptEncoder(checkpoint, fim_format(checkpoint), 4000)
        assert prompts.infill(self.REQUEST).line_break == ""

    def test_it_is_a_part_of_what_decides_a_models_answers(self, folder: Path) -> None:
        found = [fingerprint_of(open_checkpoint(folder))]
        for opens in (False, True):
            write(folder, {"line_start": {"opens_line": opens}})
            found.append(fingerprint_of(open_checkpoint(folder)))
        assert found[0] == found[1] != found[2]

    @pytest.mark.parametrize(
        ("section", "error"),
        [
            ({"opens_line": 1}, r"'line_start\.opens_line' must be true or false, not 1"),
            ({}, "'line_start' must be an object with 'opens_line'"),
            (True, "'line_start' must be an object with 'opens_line'"),
        ],
    )
    def test_nonsense_is_one_error(self, folder: Path, section: object, error: str) -> None:
        write(folder, {"line_start": section})
        with pytest.raises(CheckpointError, match=error):
            open_checkpoint(folder)


def test_how_kv_is_reused_is_written_and_read(folder: Path) -> None:
    assert reuse_method_of(open_checkpoint(folder)) == "off"
    before = fingerprint_of(open_checkpoint(folder))
    write_reuse(folder, "cacheblend:ratio=0.4", {"carets": 1000})
    checkpoint = open_checkpoint(folder)
    assert reuse_method_of(checkpoint) == "cacheblend:ratio=0.4"
    assert fingerprint_of(checkpoint) == before, "exact answers are the same"
    for value in ("", None, 3, ["cacheblend"]):
        write(folder, {"reuse": {"method": value}})
        with pytest.raises(CheckpointError, match=r"'reuse\.method' must be the specification"):
            open_checkpoint(folder)
