"""Small tokenizers that learned their merges from code, one per way of splitting text."""

from functools import cache

from tokenizers import Tokenizer as Backend
from tokenizers import models, trainers
from tokenizers.pre_tokenizers import ByteLevel

from midfill.models.tokens.gguf_tokenizer import PRE_TOKENIZERS
from midfill.models.tokens.tokenizer import Tokenizer

SPLITS = ["gpt-2", "smollm", "qwen2", "llama3", "deepseek-coder", "seed-coder", "tekken"]
CODE = "".join(
    f"class Part{number}:\n    def get(self, key='it'):\r\n        return {{'a': self[{number}]}}\n"
    f"\n\n    # don't == '=====' && {number}.5;\n\tfor(;;){{x=y();}}\n\n        if (((a))):  # é\n"
    for number in range(40)
)


@cache
def code_tokenizer(split: str) -> Tokenizer:
    """Return a tokenizer with the split of ``PRE_TOKENIZERS`` of that name."""
    rule = PRE_TOKENIZERS[split]
    backend = Backend(models.BPE(ignore_merges=rule.whole_words))
    backend.pre_tokenizer = rule.build()
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False, initial_alphabet=ByteLevel.alphabet()
    )
    backend.train_from_iterator([CODE], trainer)
    return Tokenizer(backend)
