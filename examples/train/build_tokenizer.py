"""Train the byte-level BPE tokenizer on the training novels and write its files.

python examples/train/build_tokenizer.py --corpus CORPUS --out TOKENIZER
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from novels import read_text, training_names
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 2048
SPECIALS = ["<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]

# Runs of line ends are one piece whatever follows, so text put together from parts has the same
# tokens as the text tokenised whole, wherever the parts meet at a paragraph's end.
PIECES = r"['’](?:s|t|re|ve|m|ll|d)\b| ?\p{L}+| ?\p{N}{1,2}|\n+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# A turn is role token, content exactly as given, <|end|>. Nothing is trimmed or added, so a
# conversation rendered again begins with the same tokens and a cached prefix stays usable.
CHAT_TEMPLATE = (
    "{{- bos_token -}}\n"
    "{%- for message in messages -%}\n"
    "{%- if message.role not in ['system', 'user', 'assistant'] -%}\n"
    "{{- raise_exception('unknown role: ' ~ message.role) -}}\n"
    "{%- endif -%}\n"
    "{{- '<|' ~ message.role ~ '|>' ~ message.content ~ '<|end|>' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n"
    "{{- '<|assistant|>' -}}\n"
    "{%- endif -%}\n"
)


def train(corpus: Path) -> Tokenizer:
    """Learn the merges from the training novels; the held-out novel is not read."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (read_text(corpus, name) for name in training_names(without_validation=False))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_config(context: int) -> dict[str, object]:
    """What AutoTokenizer needs beside ``tokenizer.json``; generation ends at ``<|end|>``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "model_input_names": ["input_ids", "attention_mask"],
    }


def write(tokenizer: Tokenizer, out: Path, context: int = 8192) -> None:
    """Write the three tokenizer files of a model folder."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    text = json.dumps(tokenizer_config(context), indent=2) + "\n"
    (out / "tokenizer_config.json").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    write(train(arguments.corpus), arguments.out)


if __name__ == "__main__":
    main()
