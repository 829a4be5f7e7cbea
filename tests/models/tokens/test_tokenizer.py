"""The tokenizer, on small vocabularies made here and on the default model's."""

import json
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from midfill.errors import CheckpointError, InvalidRequestError
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.tokens.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer
from midfill.models.tokens.huggingface_tokenizer import load_folder
from midfill.models.tokens.tokenizer import Detokenizer, Tokenizer

CONTROL = ("<|endoftext|>", "<|fim_prefix|>", "<fim_suffix>")
USER_DEFINED = ("<think>", "\u00f5")
ADDED = (*CONTROL, *USER_DEFINED)


def byte_level_backend() -> tokenizers.Tokenizer:
    """Byte-level BPE trained on this file, without the byte F5, which no UTF-8 text has.

    Of the control tokens one is not flagged special.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=sorted({*pre_tokenizers.ByteLevel.alphabet()} - {"\u00f5"}),
        show_progress=False,
    )
    backend.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    flagged = ("<|endoftext|>", "<fim_suffix>")
    for text in ADDED:
        backend.add_tokens([AddedToken(text, special=text in flagged, normalized=False)])
    return backend


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_backend(), bos_token_id=500, add_bos=True)


def tricky_texts() -> st.SearchStrategy[str]:
    """Any text, with the spelling of added tokens strewn in, whole and in pieces."""
    pieces = [*ADDED, "<|", "fim_", "prefix|>", "<", "think>", " ", "\n", "1"]
    return st.lists(st.one_of(st.sampled_from(pieces), st.text(max_size=5))).map("".join)


class TestPlainText:
    @given(tricky_texts())
    def test_any_text_comes_back_byte_for_byte(self, tokenizer: Tokenizer, text: str) -> None:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()

    @given(tricky_texts())
    def test_no_text_ever_becomes_an_added_token(self, tokenizer: Tokenizer, text: str) -> None:
        assert set(tokenizer.special_tokens.values()).isdisjoint(tokenizer.encode(text))

    @given(tricky_texts())
    def test_a_continuation_is_the_same_where_no_space_is_put_first(
        self, tokenizer: Tokenizer, text: str
    ) -> None:
        assert tokenizer.encode_continuation(text) == tokenizer.encode(text)

    @pytest.mark.parametrize("text", ["\ud800", "fine until \udfff here", "\udc00\ud800"])
    def test_lone_surrogates_are_refused(self, tokenizer: Tokenizer, text: str) -> None:
        for encode in (tokenizer.encode, tokenizer.encode_continuation):
            with pytest.raises(InvalidRequestError, match=r"lone surrogate U\+D"):
                encode(text)

    def test_many_threads_may_encode_at_once(self, tokenizer: Tokenizer) -> None:
        texts = [f"thread {i} says {'word ' * i}" for i in range(64)]
        alone = [tokenizer.encode(text) for text in texts]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(tokenizer.encode, texts * 4)) == alone * 4

    def test_pieces_spelled_like_added_tokens_are_taken_apart(self) -> None:
        """A vocabulary whose ordinary pieces include its special tokens needs no parsing to
        find them in text."""
        vocabulary = {character: i for i, character in enumerate("<s>/x")} | {"<s>": 5, "</s>": 6}
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.add_special_tokens(["<s>", "</s>"])
        tokenizer = Tokenizer(backend)
        assert tokenizer.encode("x <s> </s>", parse_special=True) == [4, 5, 6]
        assert tokenizer.encode("x <s> </s>") == [4, 0, 1, 2, 0, 3, 1, 2]
        assert tokenizer.encode_continuation("<s>") == [0, 1, 2]


class TestAddedTokens:
    def test_all_are_listed_flagged_special_or_not(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.special_tokens == {text: 500 + i for i, text in enumerate(ADDED)}
        assert tokenizer.vocab_size == 505

    def test_all_are_parsed_on_request(self, tokenizer: Tokenizer) -> None:
        for text, token_id in tokenizer.special_tokens.items():
            ids = tokenizer.encode(f"a{text}b", parse_special=True)
            assert ids == [*tokenizer.encode("a"), token_id, *tokenizer.encode("b")]

    def test_control_tokens_stand_for_no_text(self, tokenizer: Tokenizer) -> None:
        for text in CONTROL:
            token_id = tokenizer.special_tokens[text]
            assert tokenizer.token_bytes(token_id) == b""
            assert tokenizer.token_text(token_id) == text
            assert tokenizer.decode([*tokenizer.encode("a"), token_id]) == "a"

    def test_user_defined_tokens_stand_for_their_name(self, tokenizer: Tokenizer) -> None:
        think = tokenizer.special_tokens["<think>"]
        assert tokenizer.decode([think]) == tokenizer.token_text(think) == "<think>"

    def test_a_name_in_the_byte_alphabet_stands_for_the_byte(self, tokenizer: Tokenizer) -> None:
        # DeepSeek-Coder adds the bytes its training text never had in this way.
        token_id = tokenizer.special_tokens["\u00f5"]
        assert tokenizer.token_bytes(token_id) == b"\xf5"
        assert tokenizer.token_text(token_id) == "\\xf5"

    def test_blank_ones_are_text_like_any_other(self) -> None:
        description = json.loads(byte_level_backend().to_str())
        vocabulary = description["model"]["vocab"]
        for text in ("    ", "\n\n"):  # pieces that no merge makes, as in Gemma's vocabulary
            vocabulary[text] = len(vocabulary) + len(ADDED)
        backend = tokenizers.Tokenizer.from_str(json.dumps(description))
        backend.add_tokens([AddedToken(text, normalized=False) for text in ("    ", "\n\n")])
        tokenizer = Tokenizer(backend)
        spaces, breaks = tokenizer.special_tokens["    "], tokenizer.special_tokens["\n\n"]
        text = "if x:\n        return  y\n\nelse"
        for encode in (tokenizer.encode, tokenizer.encode_continuation):
            ids = encode(text)
            assert ids.count(spaces) == 2
            assert ids.count(breaks) == 1
            assert tokenizer.decode(ids) == text

    def test_ids_beyond_the_vocabulary_stand_for_nothing(self, tokenizer: Tokenizer) -> None:
        for token_id in (-1, 505, 2**70):
            assert tokenizer.token_bytes(token_id) == b""
            assert tokenizer.token_text(token_id) == f"<token {token_id}>"

    def test_well_known_end_tokens_are_found(self) -> None:
        tokenizer = Tokenizer(byte_level_backend(), eos_token_ids=[7])
        assert tokenizer.eos_token_ids == (7, 500)
        assert not tokenizer.add_bos


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    backend = byte_level_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, name: str, **content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


class TestHuggingFaceFolder:
    def test_truncation_and_padding_are_switched_off(self, folder: Path) -> None:
        text = "the quick brown fox"
        assert load_folder(folder).decode(load_folder(folder).encode(text)) == text

    def test_end_tokens_come_from_every_file_that_names_some(self, folder: Path) -> None:
        write(folder, "tokenizer_config.json", eos_token={"content": "<fim_suffix>"})
        write(folder, "generation_config.json", eos_token_id=[7, 8])
        write(folder, "config.json", eos_token_id=9, bos_token_id=3)
        tokenizer = load_folder(folder)
        assert tokenizer.eos_token_ids == (502, 7, 8, 9, 500)
        assert tokenizer.bos_token_id == 3

    def test_whether_bos_is_added_is_what_the_tokenizer_itself_does(self, folder: Path) -> None:
        write(folder, "tokenizer_config.json", bos_token="<|endoftext|>")
        assert not load_folder(folder).add_bos
        backend = byte_level_backend()
        backend.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 500)]
        )
        backend.save(str(folder / "tokenizer.json"))
        tokenizer = load_folder(folder)
        assert tokenizer.add_bos
        assert tokenizer.bos_token_id == 500
        assert tokenizer.encode("a", parse_special=True) == tokenizer.encode("a")

    def test_tokenizer_config_decides_on_bos(self, folder: Path) -> None:
        for flag in (True, False):
            write(folder, "tokenizer_config.json", bos_token="<|endoftext|>", add_bos_token=flag)
            assert load_folder(folder).add_bos is flag

    def test_tokens_only_tokenizer_config_lists_are_added(self, folder: Path) -> None:
        listed = {"505": {"content": "<|new|>", "special": True}, "500": {"content": ADDED[0]}}
        write(folder, "tokenizer_config.json", added_tokens_decoder=listed)
        tokenizer = load_folder(folder)
        assert tokenizer.encode("<|new|>", parse_special=True) == [505]
        assert 505 not in tokenizer.encode("<|new|>")

    def test_a_listed_token_that_cannot_have_its_id_is_an_error(self, folder: Path) -> None:
        listed = {"600": {"content": "<|new|>"}}
        write(folder, "tokenizer_config.json", added_tokens_decoder=listed)
        with pytest.raises(CheckpointError, match=r"'<\|new\|>' can't have id 600"):
            load_folder(folder)

    def test_the_chat_template_may_lie_in_three_places(self, folder: Path) -> None:
        assert load_folder(folder).chat_template is None
        several = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
        write(folder, "tokenizer_config.json", chat_template=several)
        assert load_folder(folder).chat_template == "D"
        write(folder, "tokenizer_config.json", chat_template="C")
        assert load_folder(folder).chat_template == "C"
        (folder / "chat_template.jinja").write_text("J")
        assert load_folder(folder).chat_template == "J"

    def test_what_is_broken_is_named(self, folder: Path) -> None:
        (folder / "tokenizer_config.json").write_text("{")
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: not valid JSON"):
            load_folder(folder)
        (folder / "tokenizer_config.json").write_text("[]")
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: must hold a JSON obj"):
            load_folder(folder)
        (folder / "tokenizer_config.json").unlink()
        merges_that_do_not_fit = {"type": "BPE", "vocab": {"a": 0}, "merges": ["a a"]}
        for content in ({}, {"model": merges_that_do_not_fit}):
            (folder / "tokenizer.json").write_text(json.dumps(content))
            with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
                load_folder(folder)
        (folder / "tokenizer.json").unlink()
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: the file is missing"):
            load_folder(folder)


NORMAL, UNKNOWN, CONTROL_TYPE, USER_TYPE, UNUSED, BYTE = range(1, 7)


def byte_level_metadata(pre: str = "smollm", **more: object) -> dict[str, object]:
    """The GGUF metadata of the vocabulary above, its control tokens typed as converters do."""
    model = json.loads(byte_level_backend().to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), *ADDED, "[PAD505]"]
    types = [NORMAL] * 500 + [CONTROL_TYPE] * 3 + [USER_TYPE] * 2 + [USER_TYPE]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        **{f"tokenizer.{key}": value for key, value in more.items()},
    }


class TestByteLevelGguf:
    def test_it_equals_the_tokenizer_it_was_converted_from(self, tokenizer: Tokenizer) -> None:
        rebuilt = build_tokenizer(byte_level_metadata("gpt-2"))
        text = Path(__file__).read_text(encoding="utf-8")
        assert rebuilt.encode(text) == tokenizer.encode(text)
        assert rebuilt.special_tokens == tokenizer.special_tokens
        assert rebuilt.encode(text, parse_special=True) == tokenizer.encode(
            text, parse_special=True
        )

    def test_padding_of_the_vocabulary_is_no_token(self) -> None:
        rebuilt = build_tokenizer(byte_level_metadata())
        assert "[PAD505]" not in rebuilt.special_tokens
        assert rebuilt.token_bytes(505) == b""
        assert rebuilt.decode(rebuilt.encode("[PAD505]", parse_special=True)) == "[PAD505]"

    def test_what_else_the_keys_say(self) -> None:
        metadata = byte_level_metadata(chat_template="T") | {
            "tokenizer.ggml.bos_token_id": 500,
            "tokenizer.ggml.eos_token_id": 502,
            "tokenizer.ggml.eot_token_id": 2**32 - 1,  # how some converters write "none"
            "tokenizer.ggml.eom_token_id": 3,
        }
        rebuilt = build_tokenizer(metadata)
        assert (rebuilt.bos_token_id, rebuilt.add_bos, rebuilt.chat_template) == (500, False, "T")
        assert rebuilt.eos_token_ids == (502, 3, 500)
        assert build_tokenizer(metadata | {"tokenizer.ggml.add_bos_token": True}).add_bos
        # Llama 3's vocabulary begins prompts with BOS when the file says nothing.
        assert build_tokenizer(metadata | {"tokenizer.ggml.pre": "llama-bpe"}).add_bos

    def test_a_padding_id_makes_no_ordinary_token_special(self) -> None:
        metadata = byte_level_metadata() | {"tokenizer.ggml.padding_token_id": 0}
        assert build_tokenizer(metadata).token_bytes(0) == b"!"

    @pytest.mark.parametrize(
        ("key", "value", "problem"),
        [
            ("model", "rwkv", "model 'rwkv' is not a tokenizer midfill knows"),
            ("model", None, "model is missing"),
            ("pre", None, "pre is missing; convert the model again"),
            ("pre", "klingon", "pre 'klingon' is not a split midfill knows"),
            ("tokens", [1, 2], "tokens must be a list of strings"),
            ("tokens", ["a", "b", "a"], "tokens holds 'a' twice"),
            ("token_type", [1], "token_type has 1 entries for 506 tokens"),
            ("merges", ["x nonsense"], "merges do not fit the vocabulary"),
            ("bos_token_id", "one", "bos_token_id must be a token id"),
            ("add_bos_token", 1, "add_bos_token must be true or false"),
        ],
    )
    def test_what_is_broken_is_named(self, key: str, value: object, problem: str) -> None:
        metadata = byte_level_metadata() | {f"tokenizer.ggml.{key}": value}
        if key == "tokens":
            del metadata["tokenizer.ggml.token_type"]
        if value is None:
            del metadata[f"tokenizer.ggml.{key}"]
        with pytest.raises(CheckpointError, match=f"^tokenizer in GGUF metadata: .*{problem}"):
            build_tokenizer(metadata)


class TestPreTokenizers:
    """Words of one line of code; expected splits follow from the published patterns."""

    TEXT = "if x12 !=  'don't':\n\n\treturn 1234"

    @pytest.mark.parametrize(
        ("names", "words"),
        [
            (
                ["gpt-2", "phi-2", "mellum", "olmo"],
                "if| x|12| !=| | '|don|'t|':|\n\n|\t|return| 1234",
            ),
            (
                ["smollm", "starcoder", "refact", "codeshell", "command-r"],
                "if| x|1|2| !=| | '|don|'t|':|\n\n|\t|return| |1|2|3|4",
            ),
            (
                ["qwen2", "deepseek-r1-qwen"],
                "if| x|1|2| !=| | '|don|'t|':\n\n|\treturn| |1|2|3|4",
            ),
            (["dbrx", "llama-bpe", "llama3"], "if| x|12| !=| | '|don|'t|':\n\n|\treturn| |123|4"),
            (["seed-coder"], "if| x|1|2| !=| | '|don|'t|':|\n\n|\treturn| |1|2|3|4"),
            (["gpt-4o"], "if| x|12| !=| | '|don't|':\n\n|\treturn| |123|4"),
            (["tekken"], "if| x|1|2| !=| | '|don|'t|':\n\n|\treturn| |1|2|3|4"),
            (
                ["deepseek-coder"],
                "if| x|1|2| !|= | '|don|'|t|':|\n|\n|\treturn| |1|2|3|4",
            ),
            (
                ["deepseek-llm"],
                "if| x|1|2| !=| | '|don|'|t|':|\n|\n|\treturn| |1|2|3|4",
            ),
            (["deepseek-v3"], "if| x|12| !=| | '|don|'t|':\n\n|\treturn| |123|4"),
        ],
    )
    def test_words(self, names: list[str], words: str) -> None:
        for name in names:
            split = PRE_TOKENIZERS[name].build().pre_tokenize_str(self.TEXT)
            assert "|".join(self.TEXT[start:end] for _, (start, end) in split) == words, name

    def test_no_word_loses_a_character(self) -> None:
        text = self.TEXT + "\r\n\u4e2d\u6587 \u00e9\u0301 \U0001f642 \u0664\u0665"
        for name, pre_tokenizer in PRE_TOKENIZERS.items():
            split = pre_tokenizer.build().pre_tokenize_str(text)
            assert "".join(text[start:end] for _, (start, end) in split) == text, name


def sentencepiece_metadata() -> dict[str, object]:
    """A SentencePiece vocabulary in which every piece can be put together in one way only."""
    pieces = ["\u2581", "a", "b", "c", "ab", "abc", "\u2581a", "\u2581ab", "cc"]
    scores = [-9.0, -9.0, -9.0, -9.0, -2.0, -4.0, -3.0, -5.0, -1.0]
    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    sentinel = ["\u2581<PRE>"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*special, *bytes_, *pieces, *sentinel],
        "tokenizer.ggml.scores": [0.0] * 259 + scores + [0.0],
        "tokenizer.ggml.token_type": [
            *(UNKNOWN, CONTROL_TYPE, CONTROL_TYPE),
            *[BYTE] * 256,
            *[NORMAL] * (len(pieces) + 1),
        ],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def naive_sentencepiece(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece's rule: merge the neighbours whose piece scores best, leftmost first."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    score_of = dict(zip(tokens[259:-1], scores[259:-1], strict=True))
    parts = list(text.replace(" ", "\u2581"))
    while True:
        pairs = [(score_of.get(a + b), -i) for i, (a, b) in enumerate(pairwise(parts))]
        best = max((pair for pair in pairs if pair[0] is not None), default=None)
        if best is None:
            break
        at = -best[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = []
    for part in parts:
        if part in score_of:
            ids.append(tokens.index(part))
        else:
            ids += [3 + byte for byte in part.encode()]
    return ids


class TestSentencePieceGguf:
    tokenizer = build_tokenizer(sentencepiece_metadata())

    @given(st.text(alphabet="abc <\u00e9\U0001f642", max_size=30))
    def test_pieces_are_merged_best_score_first(self, text: str) -> None:
        metadata = sentencepiece_metadata()
        assert self.tokenizer.encode_continuation(text) == naive_sentencepiece(text, metadata)
        if text:
            assert self.tokenizer.encode(text) == naive_sentencepiece(" " + text, metadata)

    @given(st.text())
    def test_a_continuation_stands_for_exactly_its_text(self, text: str) -> None:
        ids = self.tokenizer.encode_continuation(text)
        assert self.tokenizer.decode(ids) == text.replace("\u2581", " ")

    def test_text_begins_with_a_space_unless_the_file_says_no(self) -> None:
        assert self.tokenizer.decode(self.tokenizer.encode("ab")) == " ab"
        metadata = sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False}
        bare = build_tokenizer(metadata)
        assert bare.decode(bare.encode("ab")) == "ab"

    def test_sentinels_are_control_tokens_though_typed_as_ordinary_ones(self) -> None:
        assert self.tokenizer.special_tokens["\u2581<PRE>"] == 268
        assert self.tokenizer.token_bytes(268) == b""
        assert 268 not in self.tokenizer.encode("x <PRE>")

    def test_prompts_begin_with_bos(self) -> None:
        assert (self.tokenizer.bos_token_id, self.tokenizer.add_bos) == (1, True)
        assert self.tokenizer.eos_token_ids == (2,)


def source_code(characters: int) -> str:
    """The standard library's source, as much of it as asked for."""
    parts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(path.read_text(encoding="utf-8", errors="ignore"))
        size += len(parts[-1])
        if size >= characters:
            break
    return "".join(parts)[:characters]


def random_unicode(characters: int) -> Iterator[str]:
    """Lines of characters from all planes that are in use, ASCII among them."""
    random = Random(0)
    ranges = [(0x20, 0x7F), (0xA0, 0x800), (0x800, 0xD800), (0x1F300, 0x1FB00), (0x20000, 0x2FA20)]
    for _ in range(characters // 50):
        yield "".join(chr(random.randrange(*random.choice(ranges))) for _ in range(50))


@pytest.fixture(scope="module")
def default_model() -> Checkpoint:
    return open_checkpoint(resolve(DEFAULT_MODEL))


@pytest.mark.real_model
class TestDefaultModel:
    @pytest.mark.slow
    def test_ids_are_transformers_ids_on_a_megabyte(self, default_model: Checkpoint) -> None:
        from transformers import AutoTokenizer

        tokenizer, path = default_model.tokenizer, default_model.path
        reference = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        # transformers takes vocabulary and merges from the file but GPT-2's split for granted;
        # SmolLM2's own tokenizer.json splits off every digit first.
        reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        texts = [source_code(900_000), "\n".join(random_unicode(100_000))]
        texts += [f"<|im_start|>user\n{texts[0][:1000]}<|im_end|>\n<|endoftext|>"]
        for text in texts:
            assert tokenizer.encode(text, parse_special=True) == reference.encode(
                text, add_special_tokens=False
            )
            plain = reference(text, add_special_tokens=False, split_special_tokens=True)
            assert tokenizer.encode(text) == plain.input_ids
            assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_what_the_file_says_of_it(self, default_model: Checkpoint) -> None:
        tokenizer = default_model.tokenizer
        assert tokenizer.vocab_size == 49152
        assert tokenizer.eos_token_ids == (2, 0)  # <|im_end|>, <|endoftext|>
        assert (tokenizer.bos_token_id, tokenizer.add_bos) == (1, False)
        assert tokenizer.special_tokens["<|im_start|>"] == 1
        assert "<|im_start|>" in str(tokenizer.chat_template)


END = "<|endoftext|>"


def byte_tokenizer() -> Tokenizer:
    """One token a byte, so that any bytes can be spelled; and one control token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    return Tokenizer(backend)


TOKENIZER = byte_tokenizer()
ID_OF = {TOKENIZER.token_bytes(token_id): token_id for token_id in range(256)}


def ids_of(data: bytes) -> list[int]:
    return [ID_OF[bytes([byte])] for byte in data]


def any_bytes() -> st.SearchStrategy[bytes]:
    """Bytes that are nearly UTF-8: text, cut characters, stray and forbidden bytes."""
    characters = st.text(max_size=3).map(str.encode)
    cut = st.characters(min_codepoint=0x80, codec="utf-8").map(lambda c: c.encode()[:-1])
    stray = st.sampled_from([b"\x80", b"\xc0", b"\xe2\x28", b"\xed\xa0\x80", b"\xf5", b"\xff"])
    return st.lists(st.one_of(characters, cut, stray, st.binary(max_size=3))).map(b"".join)


@given(any_bytes(), st.lists(st.integers(0, 5)))
@example(b"\xf0\x9f\x99", [1, 1, 1])
@example("\U0001f642".encode(), [1, 1, 1, 1])
def test_pieces_add_up_to_decoding_all_at_once(data: bytes, sizes: list[int]) -> None:
    ids = ids_of(data)
    detokenizer, pieces = Detokenizer(TOKENIZER), []
    for size in [*sizes, len(ids)]:
        pieces.append(detokenizer.push(ids[:size]))
        ids = ids[size:]
    pieces.append(detokenizer.flush())
    whole = data.decode("utf-8", errors="replace")
    assert "".join(pieces) == whole == TOKENIZER.decode(ids_of(data))


@given(st.text())
def test_a_character_is_returned_with_its_last_byte(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    for character in text:
        *first, last = ids_of(character.encode())
        assert detokenizer.push(first) == ""
        assert detokenizer.push([last]) == character
    assert detokenizer.flush() == ""


def test_control_tokens_write_nothing_and_do_not_split_a_character() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    end = TOKENIZER.special_tokens[END]
    first, second = ids_of("\u00e9".encode())
    assert detokenizer.push([end, first, end]) == ""
    assert detokenizer.push([end, second, end]) == "\u00e9"
