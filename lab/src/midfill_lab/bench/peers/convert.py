"""A program of its own that writes a model as a Hugging Face folder.

    PYTHON convert.py MODEL FOLDER FORMAT

MODEL is a GGUF file or a Hugging Face folder. FORMAT is how the weights are stored: float32, which
loses nothing, bfloat16, or w8a8: the layers' matrices in int8, one scale per output, for int8
activations with a scale per token; the others in bfloat16.

It is run with the interpreter of the server that needs the folder; that has to have transformers,
gguf and accelerate. It imports nothing of midfill.
"""

import json
import sys
from pathlib import Path

W8A8 = "w8a8"
"""The layers' matrices and what they are multiplied by in int8, all else in bfloat16."""


def convert(source: Path, folder: Path, stored: str = "float32") -> None:
    """Read ``source``, write ``folder``, weights as ``stored``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(source)}
    if source.is_file():
        where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    dtype = torch.bfloat16 if stored == W8A8 else getattr(torch, stored)
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype)
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
    fresh.save_pretrained(folder, max_shard_size="1TB")
    tokenizer.save_pretrained(folder)
    if stored == W8A8:
        _quantize(folder)


def _quantize(folder: Path) -> None:
    """Rewrite a folder's weights as ``W8A8``, in the format of the library compressed-tensors."""
    import torch
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].float()
        scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-10) / 127
        tensors[name] = (weight / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": int8 | {"strategy": "channel", "dynamic": False},
                "input_activations": int8 | {"strategy": "token", "dynamic": True},
            }
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
