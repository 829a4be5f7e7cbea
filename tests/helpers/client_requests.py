"""Requests as editor plugins send them, and how each reads the answer.

Read from the sources of llama.vim a1c8e6e, llama.vscode 3938fb3, minuet-ai.nvim 479487c, Continue
d0a3c0b6, Tabby 21b29048, twinny 193d14c, llm-ls 1c52b94, and single files of Zed
(crates/edit_prediction). Settings are the plugins' defaults. What a plugin does not send is not
here either.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MODEL = "tiny-llama"
PREFIX = "def area(w, h):\n    return w"
SUFFIX = "\n\nprint(area(2, 3))\n"
TEMPLATE = f"<fim_prefix>{PREFIX}<fim_suffix>{SUFFIX}<fim_middle>"
CHUNK = "def one():\n    return 1\n"
_JSON = {"Content-Type": "application/json"}
_ANY_KEY = {**_JSON, "Authorization": "Bearer none"}


@dataclass(frozen=True)
class ClientRequest:
    """A request of a plugin.

    Attributes:
        client: whose it is, and what it is for.
        path: where it is sent.
        body: its JSON.
        read: returns the completion that the plugin finds in the body of the response; raises
            where the plugin would find none.
        headers: those that matter.
    """

    client: str
    path: str
    body: dict[str, Any]
    read: Callable[[str], str]
    headers: dict[str, str] = field(default_factory=lambda: _JSON)


def _json(find: Callable[[Any], str]) -> Callable[[str], str]:
    return lambda text: find(json.loads(text))


def _events(find: Callable[[Any], str]) -> Callable[[str], str]:
    """Read server-sent events as far as they are JSON."""

    def read(text: str) -> str:
        lines = [line.removeprefix("data:").strip() for line in text.split("\n")]
        return "".join(find(json.loads(line)) or "" for line in lines if line.startswith("{"))

    return read


def _lines(find: Callable[[Any], str]) -> Callable[[str], str]:
    return lambda text: "".join(find(json.loads(line)) for line in text.splitlines() if line)


def _read_llama_vim(text: str) -> str:
    """Vim calls back with each line; the plugin looks for ``"content":"`` before it decodes."""
    (line,) = text.split("\n")
    assert re.search(r"^\s*{", line)
    assert re.search(r'"content"\s*:"', line)
    answer = json.loads(line)
    for name in ("prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms"):
        float(answer[f"timings/{name}"])
    int(answer["tokens_cached"])
    return str(answer["content"])


def _read_llama_vscode(text: str) -> str:
    """The status bar reads the rest of a single completion."""
    answer = json.loads(text)
    int(answer["generation_settings"]["n_ctx"])
    f"{answer['tokens_cached']} {answer['timings']['prompt_n']}"
    return str(answer["content"])


def _read_zed(text: str) -> str:
    answer = json.loads(text)
    for name in ("id", "object", "created", "model", "usage"):
        assert name in answer
    return str(answer["choices"][0]["text"])


_LLAMA_VIM = {
    "id_slot": 0,
    "input_prefix": "def area(w, h):\n",
    "input_suffix": SUFFIX,
    "input_extra": [{"text": CHUNK, "time": [15, 250000], "filename": "one.py"}],
    "prompt": "    return w",
    "n_predict": 128,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.9,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 250,
    "response_fields": [
        "content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms",
        "timings/prompt_per_second", "timings/predicted_n", "timings/predicted_ms",
        "timings/predicted_per_token_ms", "timings/predicted_per_second", "truncated",
        "tokens_cached",
    ],
    "model": "",
}  # fmt: skip
_LLAMA_VIM_WARM_UP = {
    "id_slot": 0,
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": _LLAMA_VIM["input_extra"],
    "prompt": "",
    "n_predict": 0,
    "temperature": 0.0,
    "samplers": [],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 1,
    "t_max_predict_ms": 1,
    "response_fields": [""],
    "model": "",
}
_LLAMA_VSCODE = {
    "id_slot": 0,
    "input_prefix": "def area(w, h):\n",
    "input_suffix": SUFFIX,
    "input_extra": [{"text": CHUNK, "time": 1795343270123, "filename": "/home/u/one.py"}],
    "prompt": "    return w",
    "n_predict": 128,
    "n_cmpl": 3,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "n_indent": 4,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 2500,
}
_LLAMA_VSCODE_WARM_UP = {
    "id_slot": 0,
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": _LLAMA_VSCODE["input_extra"],
    "prompt": "",
    "n_predict": 0,
    "samplers": [],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1,
}
_MINUET = {
    "model": MODEL,
    "stream": True,
    "prompt": f"# language: python\n# indentation: use 4 spaces for a tab\n{PREFIX}",
    "suffix": SUFFIX,
}
_CONTINUE_STOP = [
    "<fim_prefix>",
    "<fim_suffix>",
    "<fim_middle>",
    "/src/",
    "```",
    "\ndef",
    "\nclass",
]
_CONTINUE_OLLAMA = {
    "model": MODEL,
    "prompt": PREFIX,
    "suffix": SUFFIX,
    "raw": True,
    "options": {
        "temperature": 0.01, "num_predict": 4096, "stop": _CONTINUE_STOP, "num_ctx": 8192,
    },
    "keep_alive": 1800,
    "stream": True,
}  # fmt: skip
_TABBY = {
    "language": "python",
    "segments": {
        "prefix": PREFIX,
        "suffix": SUFFIX,
        "filepath": "src/shapes.py",
        "git_url": "https://example.org/demo/shapes.git",
        "declarations": [{"filepath": "one.py", "body": CHUNK}],
        "relevant_snippets_from_changed_files": [
            {"filepath": "two.py", "body": CHUNK, "score": 0.7}
        ],
        "relevant_snippets_from_recently_opened_files": [],
        "clipboard": "w * h",
    },
    "user": "u",
    "temperature": None,
}
_ZED_STOP = ["<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>"]
_LLM_LS = {"temperature": 0.2, "top_p": 0.95, "prompt": TEMPLATE, "model": MODEL, "stream": False}

CLIENT_REQUESTS = [
    ClientRequest("llama.vim", "/infill", _LLAMA_VIM, _read_llama_vim),
    ClientRequest(
        "llama.vim on a line of blanks",
        "/infill",
        {**_LLAMA_VIM, "prompt": "", "n_indent": 0},
        _read_llama_vim,
    ),
    ClientRequest("llama.vim warms up", "/infill", _LLAMA_VIM_WARM_UP, str),
    ClientRequest("llama.vscode", "/infill", _LLAMA_VSCODE, _json(lambda all: all[0]["content"])),
    ClientRequest(
        "llama.vscode for one completion",
        "/infill",
        {**_LLAMA_VSCODE, "n_cmpl": 1},
        _read_llama_vscode,
    ),
    ClientRequest("llama.vscode warms up", "/infill", _LLAMA_VSCODE_WARM_UP, _read_llama_vscode),
    ClientRequest(
        "minuet-ai openai_fim_compatible",
        "/v1/completions",
        _MINUET,
        _events(lambda event: event["choices"][0]["text"]),
        _ANY_KEY,
    ),
    ClientRequest(
        "minuet-ai deepseek",
        "/beta/completions",
        _MINUET,
        _events(lambda event: event["choices"][0]["text"]),
        _ANY_KEY,
    ),
    ClientRequest(
        "minuet-ai codestral",
        "/v1/fim/completions",
        _MINUET,
        _events(lambda event: event["choices"][0]["delta"]["content"]),
        _ANY_KEY,
    ),
    ClientRequest(
        "Continue llama.cpp",
        "/completion",
        {
            "model": MODEL,
            "prompt": TEMPLATE,
            "stream": True,
            "n_predict": 4096,
            "stop": _CONTINUE_STOP,
            "temperature": 0.01,
        },
        _events(lambda event: event["content"]),
        {**_JSON, "Authorization": "Bearer undefined"},
    ),
    ClientRequest(
        "Continue ollama",
        "/api/generate",
        _CONTINUE_OLLAMA,
        _lines(lambda line: line["response"]),
    ),
    ClientRequest(
        "Continue asks whether the model infills",
        "/api/show",
        {"name": MODEL},
        _json(lambda answer: "yes" if ".Suffix" in answer["template"] else "no"),
    ),
    ClientRequest(
        "Continue mistral",
        "/v1/fim/completions",
        {
            "model": MODEL,
            "prompt": PREFIX,
            "suffix": SUFFIX,
            "max_tokens": 4096,
            "temperature": 0.01,
            "stop": _CONTINUE_STOP,
            "stream": True,
        },
        _events(lambda event: event["choices"][0]["delta"]["content"]),
        {**_ANY_KEY, "x-api-key": "none"},
    ),
    ClientRequest(
        "Continue openai",
        "/v1/completions",
        {
            "model": MODEL,
            "max_tokens": 4096,
            "temperature": 0.01,
            "stop": _CONTINUE_STOP[:4],
            "prompt": TEMPLATE,
            "stream": True,
        },
        _events(lambda event: event["choices"][0]["text"]),
        {**_ANY_KEY, "x-api-key": "none"},
    ),
    ClientRequest(
        "Zed",
        "/v1/completions",
        {"model": MODEL, "prompt": TEMPLATE, "max_tokens": 64, "stop": _ZED_STOP},
        _read_zed,
    ),
    ClientRequest(
        "Zed ollama",
        "/api/generate",
        {
            "model": MODEL,
            "prompt": TEMPLATE,
            "raw": True,
            "stream": False,
            "options": {"num_predict": 64, "temperature": 0.2, "stop": _ZED_STOP},
        },
        _json(lambda answer: answer["response"]),
    ),
    ClientRequest(
        "Tabby's agent",
        "/v1/completions",
        _TABBY,
        _json(lambda answer: answer["choices"][0]["text"]),
    ),
    ClientRequest(
        "twinny ollama",
        "/api/generate",
        {
            "model": MODEL,
            "prompt": TEMPLATE,
            "stream": True,
            "keep_alive": "5m",
            "options": {"temperature": 0.2, "num_predict": 512},
        },
        _lines(lambda line: line["response"]),
    ),
    ClientRequest(
        "twinny llamacpp",
        "/completion",
        {"prompt": TEMPLATE, "stream": True, "temperature": 0.2, "max_tokens": 512},
        _events(lambda event: event["content"]),
    ),
    ClientRequest(
        "llm-ls openai",
        "/v1/completions",
        {**_LLM_LS, "max_tokens": 60},
        _json(lambda answer: answer["choices"][0]["text"]),
    ),
    ClientRequest(
        "llm-ls ollama",
        "/api/generate",
        {**_LLM_LS, "options": {"num_predict": 60}},
        _json(lambda answer: answer["response"]),
    ),
]
