"""Write a trained run as a model folder in float16: what mlx-lm and transformers load.

python examples/train/export_folder.py --run RUN --tokenizer TOKENIZER --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from architecture import Shape
from build_tokenizer import SPECIALS
from safetensors.torch import load_file, save_file

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def token_ids() -> dict[str, object]:
    """Special ids for ``config.json``: a reply ends at ``<|end|>``, a text at ``<|eos|>``."""
    ids = {name: SPECIALS.index(f"<|{name}|>") for name in ("pad", "bos", "eos", "end")}
    return {
        "pad_token_id": ids["pad"],
        "bos_token_id": ids["bos"],
        "eos_token_id": [ids["end"], ids["eos"]],
    }


def write_json(path: Path, content: dict[str, object]) -> None:
    """Write one JSON file, indented, with a final line end."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def half(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights in float16.

    Raises:
        ValueError: A value is too large for float16.
    """
    converted = {name: tensor.to(torch.float16).contiguous() for name, tensor in weights.items()}
    for name, tensor in converted.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} does not fit in float16")
    return converted


def export(run: Path, tokenizer: Path, out: Path) -> None:
    """Write config, weights, generation defaults and tokenizer files."""
    shape = Shape(**json.loads((run / "run.json").read_text())["settings"]["shape"])
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", shape.config() | token_ids())
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
    write_json(out / "generation_config.json", token_ids() | sampling)
    weights = half(load_file(run / "weights.safetensors"))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    export(arguments.run, arguments.tokenizer, arguments.out)


if __name__ == "__main__":
    main()
