"""Which FIM tokens a model has by its name, where no server can be asked for its vocabulary."""

import re

from midfill.infill.formats import FAMILIES

_FAMILIES = (
    ("qwen2.5-coder", r"qwen[\d.-]*.*coder|qwen2\.5|qwen3"),
    ("starcoder2", r"starcoder-?2"),
    ("starcoder", r"starcoder|stable-?code|granite.*code|refact"),
    ("santacoder", r"santacoder"),
    ("codellama", r"code-?llama"),
    ("granite", r"granite"),
    ("codegemma", r"code-?gemma"),
    ("deepseek-coder", r"deepseek"),
    ("aixcoder", r"aixcoder"),
    ("seed-coder", r"seed-?coder"),
    ("codegeex", r"codegeex|glm-?4"),
    ("codestral", r"codestral"),
)


def tokens_by_name(model: str) -> tuple[str, ...]:
    """Return the FIM tokens of the family that a model's name tells; none if it tells none."""
    for name, pattern in _FAMILIES:
        if re.search(pattern, model.lower()):
            family = next(each for each in FAMILIES if each.name == name)
            tokens = (family.prefix, family.suffix, family.middle, *family.stop)
            further = (family.repository, family.file_separator)
            return tuple(dict.fromkeys(text for text in (*tokens, *further) if text is not None))
    return ()
