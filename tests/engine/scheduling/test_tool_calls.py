"""find_tool: the tool that an answer calls."""

import pytest

from midfill.engine.scheduling.tool_calls import find_tool


@pytest.mark.parametrize(
    ("answer", "tool"),
    [
        ("I look.\n```bash\ngrep -rn x src\n```\n", "grep"),
        ("```\npytest\n```", "pytest"),
        ("```sh\n\n  ls | wc\n```", "ls"),
        ('<tool_call>\n{"name": "read_file", "arguments": {"path": "{a}"}}\n</tool_call>',
         "read_file"),
        ('{"type": "function", "function": {"name": "run", "arguments": "{}"}}', "run"),
        ('[{"name": "search", "parameters": {}}]', "search"),
        ("", ""),
        ("The answer is 4.", ""),
        ("```python\nprint(1)\n```", ""),
        ("```bash\nls\n```\nand\n```bash\npwd\n```", ""),
        ('{"name": "a", "arguments": {}} {"name": "b", "arguments": {}}', ""),
        ("```bash\ngrep -rn", ""),
        ('<tool_call>{"name": "read_file", "argum', ""),
        ('{"name": "a person", "age": 3}', ""),
        ('{"name": 3, "arguments": {}}', ""),
        ('{"name": "", "arguments": {}}', ""),
        ("```bash\n```", ""),
    ],
)  # fmt: skip
def test_examples(answer: str, tool: str) -> None:
    assert find_tool(answer) == tool


@pytest.mark.parametrize(
    "answer", ["{" * 100_000, '{"a":' * 100_000, "[" * 9 + "{" * 50, "```" * 9999]
)
def test_hostile_answers_take_no_long_time_and_call_nothing(answer: str) -> None:
    assert find_tool(answer) == ""


def test_names_are_short() -> None:
    assert len(find_tool(f"```bash\n{'x' * 5000}\n```")) == 64
