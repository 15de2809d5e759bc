"""The tokenizer of tiny models: one id per byte, and specials up to the number of logits."""

from __future__ import annotations

from typing import Any, Final

_SPECIALS: Final = ("<|begin|>", "<|end|>", "<|role|>", "<|turn_end|>")

#: 256 bytes and 64 specials, most of them reserved, so that every logit has a token.
VOCAB_SIZE: Final = 320

#: Line ends are written inside expressions, since Jinja trims them outside.
CHAT_TEMPLATE: Final = r"""
{%- for message in messages -%}
{{ '<|role|>' + message.role + '\n' + message.content + '<|turn_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|role|>assistant\n' }}
{%- endif -%}
"""


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE uses for each byte, by byte value."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in shown]
    table = {value: chr(value) for value in shown}
    table.update({value: chr(256 + index) for index, value in enumerate(hidden)})
    return [table[value] for value in range(256)]


def _special_tokens() -> list[str]:
    reserved = range(VOCAB_SIZE - 256 - len(_SPECIALS))
    return [*_SPECIALS, *(f"<|reserved_{index}|>" for index in reserved)]


def tokenizer() -> dict[str, Any]:
    """Byte-level BPE without merges: one id per byte, equal to the byte."""
    added = [
        {
            "id": 256 + index,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, content in enumerate(_special_tokens())
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: value for value, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }


def tokenizer_config(max_context_tokens: int) -> dict[str, Any]:
    """The tokenizer's settings."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIALS[0],
        "eos_token": _SPECIALS[1],
        "model_max_length": max_context_tokens,
        "clean_up_tokenization_spaces": False,
    }
