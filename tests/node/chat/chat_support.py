"""Real tokenizers under templates that behave as templates in the wild do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from engine import Model, mlxlm
from node.chat.messages import Message, Role

TRAINED = Path(__file__).resolve().parents[3] / "examples" / "models" / "muse-novels-6m"

CHATML = r"""
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

#: Tools and calls in the form that mlx-lm reads as ``json_tools``.
TOOLS = r"""
{%- if tools -%}{{ '<|system|>' }}{%- for tool in tools -%}
{{ tool | tojson ~ '\n' }}{%- endfor -%}{{ '<|end|>' }}{%- endif -%}
{%- for message in messages -%}
{{ '<|user|>(' ~ message.role ~ ')' if message.role == 'tool' else '<|' ~ message.role ~ '|>' }}
{{- message.content -}}
{%- for call in message.tool_calls or [] -%}{%- set tool_call = call.function -%}
{{ '<tool_call>\n{"name": "' ~ tool_call.name ~ '", "arguments": ' ~
   tool_call.arguments | tojson ~ '}\n</tool_call>' }}
{%- endfor -%}
{{ '<|end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""

#: Not prefix-stable: the beginning changes with every message.
COUNTING = r"""
{{- '<|system|>' ~ messages | length ~ ' messages<|end|>' -}}
{%- for message in messages -%}
{{ '<|' ~ message.role ~ '|>' ~ message.content ~ '<|end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""

#: Leaves out the thoughts of all answers, and opens one for the answer that follows.
STRIPPING = r"""
{%- for message in messages -%}
{%- set content = message.content.split('</think>')[-1] if message.role == 'assistant'
    else message.content -%}
{{ '<|' ~ message.role ~ '|>' ~ content ~ '<|end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|><think>\n' }}{%- endif -%}
"""

#: Takes white space off both ends of what is said.
TRIMMING = r"""
{%- for message in messages -%}
{{ '<|' ~ message.role ~ '|>' ~ message.content | trim ~ '<|end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""


def with_template(model: Model, folder: Path, template: str) -> Model:
    """``model`` as its loader makes it with ``template``, without loading the weights again."""
    tokenizer = mlxlm._load_tokenizer(folder, template)
    return Model(dataclasses.replace(model._parts, tokenizer=tokenizer))


def conversation(*texts: str, system: str = "") -> tuple[Message, ...]:
    """Messages of user and assistant in turn."""
    roles = (Role.USER, Role.ASSISTANT)
    spoken = tuple(Message(roles[index % 2], text) for index, text in enumerate(texts))
    return ((Message(Role.SYSTEM, system),) if system else ()) + spoken


def by_character(model: Model, text: str) -> list[int]:
    """Ids of ``text`` that no encoder gives for it: one character at a time."""
    return [token for character in text for token in model.encode(character)]
