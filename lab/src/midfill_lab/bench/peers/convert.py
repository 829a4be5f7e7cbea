"""A program of its own that writes a GGUF file as a Hugging Face folder.

    PYTHON convert.py MODEL.gguf FOLDER DTYPE

DTYPE is how the weights are stored: float32, which loses nothing, or bfloat16.

It is run with the interpreter of the server that needs the folder; that has to have transformers,
gguf and accelerate. It imports nothing of midfill.
"""

import sys
from pathlib import Path


def convert(source: Path, folder: Path, dtype: str = "float32") -> None:
    """Read ``source``, write ``folder``, weights as ``dtype``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # The loaded model remembers that it came from GGUF and would not be saved; a fresh one is.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):  # it shares the loaded one's weights
        fresh = type(loaded)(config)
    fresh.load_state_dict(loaded.state_dict(), assign=True)
    if config.tie_word_embeddings:
        fresh.tie_weights()
    fresh.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
