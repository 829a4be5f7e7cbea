"""Prompts as editors send them: their templates, filled in with a short document.

Read from the sources of Zed (crates/edit_prediction/src/fim.rs), Continue d0a3c0b6
(core/autocomplete/templating), twinny 193d14c (src/extension/fim-templates.ts), llm-ls
(crates/llm-ls/src/main.rs, crates/testbed) and minuet-ai.nvim 479487c (README, recipes), and from
the documentation of StarCoder2, Qwen2.5-Coder, Mellum and CodeGeeX.
"""

# ruff: noqa: RUF001 (DeepSeek's own characters)

from dataclasses import dataclass

from midfill.infill.context_files import ContextFile

PREFIX = "def area(w, h):\n    return "
SUFFIX = "\n\nprint(area(2, 3))\n"

ONE, TWO = ContextFile("import os\n", "lib/one.py"), ContextFile("b = 2\n", "two.py")
_CONTINUE_HEADER = "# Path: one.py\n# import os\n# src/main.py"
_TWINNY_HEADER = "\n#  Language: Python (python) \n#  File uri: file:///p/main.py (python) \n"
_TWINNY_FILE = "// File: /p/lib/one.py\n          // Content: \n import os"


@dataclass(frozen=True)
class ClientPrompt:
    """A prompt, and what it says.

    Attributes:
        client: who sends it, and for which models.
        prompt: the whole text.
        stop: the stop strings that come with it.
        prefix, suffix, context, path, repository: its parts, see ``FilledTemplate``.
    """

    client: str
    prompt: str
    stop: tuple[str, ...] = ()
    prefix: str = PREFIX
    suffix: str = SUFFIX
    context_files: tuple[ContextFile, ...] = ()
    path: str = ""
    repository: str = ""


_QWEN_STOP = (
    *("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<|im_start|>", "<|im_end|>"),
)
_STARCODER_STOP = ("<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>")
_STABLE_STOP = (*_STARCODER_STOP, "<file_sep>", "</fim_middle>", "</code>")
_TEXT_STOP = ("/src/", "#- coding: utf-8", "```")  # what Continue adds for every model

_ZED = [
    ClientPrompt(
        "zed codellama", f"<PRE> {PREFIX} <SUF>{SUFFIX} <MID>", ("<PRE>", "<SUF>", "<MID>")
    ),
    ClientPrompt(
        "zed starcoder",
        f"<fim_prefix>{PREFIX}<fim_suffix>{SUFFIX}<fim_middle>",
        _STARCODER_STOP,
    ),
    ClientPrompt(
        "zed deepseek-coder",
        f"<｜fim▁begin｜>{PREFIX}<｜fim▁hole｜>{SUFFIX}<｜fim▁end｜>",
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ),
    ClientPrompt(
        "zed qwen2.5-coder",
        f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>",
        _QWEN_STOP[:4],
    ),
    ClientPrompt(
        "zed codegemma",
        f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>",
        ("<|file_separator|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ),
    ClientPrompt("zed codestral", f"[SUFFIX]{SUFFIX}[PREFIX]{PREFIX}", ("[PREFIX]", "[SUFFIX]")),
    ClientPrompt(
        "zed glm",
        f"<|code_prefix|>{PREFIX}<|code_suffix|>{SUFFIX}<|code_middle|>",
        ("<|endoftext|>", "<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ),
]

_CONTINUE = [
    ClientPrompt(
        "continue qwen2.5-coder",
        f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>",
        (*_QWEN_STOP, *_TEXT_STOP),
    ),
    ClientPrompt(
        "continue qwen2.5-coder with snippets",
        "<|repo_name|>work\n<|file_sep|>lib/one.py\nimport os\n<|file_sep|>two.py\nb = 2\n"
        f"<|file_sep|>src/main.py\n<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>",
        (*_QWEN_STOP, *_TEXT_STOP),
        context_files=(ONE, TWO),
        path="src/main.py",
        repository="work",
    ),
    ClientPrompt(
        "continue starcoder and unknown models",
        f"<fim_prefix>{_CONTINUE_HEADER}\n{PREFIX}<fim_suffix>{SUFFIX}<fim_middle>",
        (*_STABLE_STOP, *_TEXT_STOP),
        context_files=(ContextFile("import os\n", "one.py"),),
        path="src/main.py",
    ),
    ClientPrompt(
        "continue starcoder2",
        "<file_sep>import os\n<file_sep>b = 2\n<file_sep>"
        f"<fim_prefix>{PREFIX}<fim_suffix>{SUFFIX}<fim_middle>",
        (*_STARCODER_STOP, "<file_sep>", "t.", "\nt"),
        context_files=(ContextFile("import os\n"), ContextFile("b = 2\n")),
    ),
    ClientPrompt(
        "continue codestral",
        f"[SUFFIX]{SUFFIX}[PREFIX]+++++ lib/one.py \nimport os\n\n+++++ two.py \nb = 2\n\n"
        f"+++++ src/main.py\n{PREFIX}",
        ("[PREFIX]", "[SUFFIX]", "\n+++++ ", *_TEXT_STOP),
        context_files=(ONE, TWO),
        path="src/main.py",
    ),
    ClientPrompt(
        "continue codestral without snippets",
        f"[SUFFIX]{SUFFIX}[PREFIX]{PREFIX}",
        ("[PREFIX]", "[SUFFIX]", "\n+++++ "),
    ),
    ClientPrompt(
        "continue granite 4",
        f"<|fim_prefix|>{_CONTINUE_HEADER}\n{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>",
        ("<|end_of_text|>", *_QWEN_STOP[1:5]),
        context_files=(ContextFile("import os\n", "one.py"),),
        path="src/main.py",
    ),
    ClientPrompt(
        "continue seed-coder",
        f"<[fim-prefix]>{_CONTINUE_HEADER}\n{PREFIX}<[fim-suffix]>{SUFFIX}<[fim-middle]>",
        (
            *("<[end▁of▁sentence]>", "<[fim-prefix]>", "<[fim-middle]>", "<[fim-suffix]>"),
            *("<[PAD▁TOKEN]>", "<[SEP▁TOKEN]>", "<[begin▁of▁sentence]>"),
        ),
        context_files=(ContextFile("import os\n", "one.py"),),
        path="src/main.py",
    ),
    ClientPrompt(
        "continue codellama",
        f"<PRE> {_CONTINUE_HEADER}\n{PREFIX} <SUF>{SUFFIX} <MID>",
        ("<PRE>", "<SUF>", "<MID>", "<EOT>"),
        context_files=(ContextFile("import os\n", "one.py"),),
        path="src/main.py",
    ),
    ClientPrompt(
        "continue deepseek",
        f"<｜fim▁begin｜>{_CONTINUE_HEADER}\n{PREFIX}<｜fim▁hole｜>{SUFFIX}<｜fim▁end｜>",
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "//", "<｜end▁of▁sentence｜>"),
        context_files=(ContextFile("import os\n", "one.py"),),
        path="src/main.py",
    ),
    ClientPrompt(
        "continue codegeex",
        f"<|user|>\n###PATH:main.py\n###LANGUAGE:Python\n###MODE:BLOCK\n<|code_suffix|>{SUFFIX}"
        f"<|code_prefix|>{PREFIX}<|code_middle|><|assistant|>\n",
        ("<|user|>", "<|code_suffix|>", "<|code_prefix|>", "<|code_middle|>", "<|assistant|>"),
        path="main.py",
    ),
    ClientPrompt(
        "continue codegeex with snippets",
        "<|user|>\n###REFERENCE:\n###PATH:lib/one.py\nimport os\n###REFERENCE:\n###PATH:two.py\n"
        "b = 2\n\n###PATH:main.py\n###LANGUAGE:Python\n###MODE:BLOCK\n"
        f"<|code_suffix|>{SUFFIX}<|code_prefix|>{PREFIX}<|code_middle|><|assistant|>\n",
        ("<|user|>", "<|endoftext|>"),
        context_files=(ONE, TWO),
        path="main.py",
    ),
]

_TWINNY = [
    ClientPrompt(
        "twinny codellama",
        f"<PRE> \n{_TWINNY_HEADER}{PREFIX} <SUF> {SUFFIX} <MID>",
        ("<EOT>",),
        prefix=f"\n{_TWINNY_HEADER}{PREFIX}",
        suffix=f" {SUFFIX}",  # the blank is twinny's own, none of CodeLlama's
    ),
    ClientPrompt(
        "twinny deepseek",
        f"<｜fim▁begin｜>\n{_TWINNY_HEADER}{PREFIX}<｜fim▁hole｜>{SUFFIX}<｜fim▁end｜>",
        ("<｜fim begin｜>", "<｜fim hole｜>", "<｜fim end｜>", "<END>", "<｜end of sentence｜>"),
        prefix=f"\n{_TWINNY_HEADER}{PREFIX}",
    ),
    ClientPrompt(
        "twinny codestral",
        f"\n\n[SUFFIX]{SUFFIX}[PREFIX]{_TWINNY_HEADER}{PREFIX}",
        ("[PREFIX]", "[SUFFIX]"),
        prefix=f"{_TWINNY_HEADER}{PREFIX}",
    ),
    ClientPrompt(
        "twinny codestral with files",
        f"#{_TWINNY_FILE}\n\n[SUFFIX]{SUFFIX}[PREFIX]{_TWINNY_HEADER}{PREFIX}",
        ("[PREFIX]", "[SUFFIX]"),
        prefix=f"{_TWINNY_HEADER}{PREFIX}",
        context_files=(ContextFile("import os\n", "/p/lib/one.py"),),
    ),
    ClientPrompt(
        "twinny codeqwen",
        f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>",
        (*_QWEN_STOP[:2], "<|file_sep|>", "<|im_end|>", "<|fim_pad|>", "<|cursor|>"),
    ),
    ClientPrompt(
        "twinny codeqwen with files",
        f"<|file_sep|>#{_TWINNY_FILE}\n\n<|file_sep|>{_TWINNY_HEADER}<|fim_prefix|>{PREFIX}"
        f"<|fim_suffix|>{SUFFIX}<|fim_middle|>",
        _QWEN_STOP,
        context_files=(
            ContextFile(f"#{_TWINNY_FILE}\n"),
            ContextFile(f"{_TWINNY_HEADER.rstrip()}\n"),
        ),
    ),
    ClientPrompt(
        "twinny starcoder",
        f"<fim_prefix>\n{_TWINNY_HEADER}{PREFIX}<fim_suffix>{SUFFIX}<fim_middle>",
        ("<|endoftext|>", "<file_sep>", "<fim_prefix>", "<repo_name>"),
        prefix=f"\n{_TWINNY_HEADER}{PREFIX}",
    ),
]

_OTHERS = [
    ClientPrompt("llm-ls starcoder", f"<fim_prefix>{PREFIX}<fim_suffix>{SUFFIX}<fim_middle>"),
    ClientPrompt("llm-ls codellama", f"<PRE> {PREFIX} <SUF>{SUFFIX} <MID>"),
    ClientPrompt(
        "minuet qwen2.5-coder",
        f"<|fim_prefix|># language: python\n{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>",
        prefix=f"# language: python\n{PREFIX}",
    ),
    ClientPrompt("santacoder", f"<fim-prefix>{PREFIX}<fim-suffix>{SUFFIX}<fim-middle>"),
    ClientPrompt(
        "starcoder2's own, with a repository",
        "<repo_name>work<file_sep>lib/one.py\nimport os<file_sep>two.py\nb = 2<file_sep>"
        f"<fim_prefix>main.py\n{PREFIX}<fim_suffix>{SUFFIX}<fim_middle>",
        context_files=(ONE, TWO),
        path="main.py",
        repository="work",
    ),
    ClientPrompt(
        "starcoder's own, with metadata inside",
        f"<fim_prefix><reponame>work<filename>main.py<gh_stars>10-100\n{PREFIX}"
        f"<fim_suffix>{SUFFIX}<fim_middle>",
        path="main.py",
        repository="work",
    ),
    ClientPrompt(
        "granite code's own, with files",
        f"<reponame>work\n<filename>lib/one.py\nimport os\n<filename>main.py\n"
        f"<fim_prefix>{PREFIX}<fim_suffix>{SUFFIX}<fim_middle>",
        context_files=(ONE,),
        path="main.py",
        repository="work",
    ),
    ClientPrompt(
        "codegemma's own, with files",
        f"<|file_separator|>lib/one.py\nimport os\n<|file_separator|>main.py\n"
        f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>",
        context_files=(ONE,),
        path="main.py",
    ),
    ClientPrompt(
        "prefix-first families' suffix-first variant",
        f"<|fim_prefix|><|fim_suffix|>{SUFFIX}<|fim_middle|>{PREFIX}",
    ),
    ClientPrompt(
        "aixcoder's own",
        f"<s>▁<AIX-SPAN-PRE>▁<AIX-SPAN-POST>{SUFFIX}▁<AIX-SPAN-MIDDLE>{PREFIX}",
    ),
    ClientPrompt(
        "seed-coder's own",
        f"<[begin▁of▁sentence]><[fim-suffix]>{SUFFIX}<[fim-prefix]>{PREFIX}<[fim-middle]>",
    ),
]

CLIENT_PROMPTS = [*_ZED, *_CONTINUE, *_TWINNY, *_OTHERS]

# Mellum shares StarCoder's tokens, but not its order.
MELLUM = ClientPrompt(
    "mellum's own",
    f"<filename>lib/one.py\nimport os\n<filename>main.py\n"
    f"<fim_suffix>{SUFFIX}<fim_prefix>{PREFIX}<fim_middle>",
    context_files=(ONE,),
    path="main.py",
)

_CURRENT = "def area(w, h):\n    return w<|user_cursor|>\n"

NEXT_EDIT_PROMPTS = {
    "zeta": "### Instruction:\nRewrite the excerpt.\n\n### User Edits:\n\nUser edited main.py:\n"
    "```diff\n-x\n+y\n```\n\n### User Excerpt:\n\n```main.py\n<|editable_region_start|>\n"
    "def area(w, h):\n    return w<|user_cursor_is_here|>\n<|editable_region_end|>\n```\n\n"
    "### Response:\n",
    "zeta with qwen's tokens": "<|file_sep|>edit history\n--- a/main.py\n+++ b/main.py\n-x\n+y\n"
    "<|file_sep|>main.py\n<|fim_prefix|>\nimport os\n<|fim_suffix|>\nprint()\n"
    f"<|fim_middle|>current\n{_CURRENT}<|fim_middle|>updated\n",
    "zeta2": "<[fim-suffix]>\nprint()\n<[fim-prefix]><filename>lib/one.py\nimport os\n\n"
    "<filename>edit_history\n--- a/main.py\n+++ b/main.py\n-x\n+y\n\n<filename>main.py\n"
    f"import os\n<<<<<<< CURRENT\n{_CURRENT}=======\n<[fim-middle]>",
    "zeta2 without its cursor": "<[fim-suffix]>\nprint()\n<[fim-prefix]><filename>main.py\n"
    "<<<<<<< CURRENT\ndef area(w, h):\n    return w\n=======\n<[fim-middle]>",
    "zeta2.1": "<[fim-suffix]>\nprint()\n<[fim-prefix]><filename>main.py\nimport os\n<|marker_1|>"
    f"{_CURRENT}<|marker_2|>\n<[fim-middle]>",
    "zeta2.1 with qwen's tokens": "<|fim_prefix|><|file_sep|>main.py\nimport os\n<|marker_1|>"
    f"{_CURRENT}<|marker_2|>\n<|fim_suffix|>print()\n<|fim_middle|>",
    "sweep": "<|file_sep|>lib/one.py\nimport os\n<|file_sep|>main.py.diff\noriginal:\nx\nupdated:\n"
    "y\n<|file_sep|>original/main.py\nx\n<|file_sep|>current/main.py\n"
    "def area(w, h):\n    return w\n<|file_sep|>updated/main.py\n",
    "instinct": "Update the editable region.\n\n### Context:\n<|context_file|>: lib/one.py\n"
    "<|snippet|>\nimport os\n\n### User Edits:\n\n\n### User Excerpt:\nmain.py\n\n"
    "<|editable_region_start|>\ndef area(w, h):\n    return w<|user_cursor_is_here|>\n"
    "<|editable_region_end|>```\n### Response:",
    "mercury": "<|current_file_content|>\ncurrent_file_path: main.py\n<|code_to_edit|>\n"
    "def area(w, h):\n    return w<|cursor|>\n<|/code_to_edit|>\n<|/current_file_content|>\n",
}
"""Prompts of next-edit models, which are never taken for infilling."""
