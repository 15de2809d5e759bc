"""Whose rows they are, over contents: weights, tokenizer, template, scalar constants as bits.

A path or a name never enters it. Needs no MLX: whoever computes rows of a folder by other means
names them by the same digests.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from engine.canonical import canonical_json, f64_bits
from engine.encodings import dtype_name
from engine.errors import ModelFolderError
from engine.folder import TOKENIZER_FILES
from kvpack.identity import DIGEST_BYTES, Identity
from kvpack.layout import CacheLayout

#: The row convention: what a stored row means. Not the build.
ENGINE_ABI: Final = "kvpack-engine/1 keys-after-rope window=p-w+1..p"

#: Stands for "no adapter" and "no chat template".
NO_DIGEST: Final = bytes(DIGEST_BYTES)

#: Tokenizer configuration that has its own place in the identity.
_TEMPLATE_KEYS: Final = frozenset({"chat_template"})

_DIGESTS_KEPT_MAX: Final = 1024


class FileDigests:
    """BLAKE3 of files, kept in memory by path, size, modification time and inode.

    A file rewritten in place within the clock's resolution and to the same size would be missed;
    model folders are not written while a node serves them.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int, int, int], bytes] = {}

    def digest(self, path: Path) -> bytes:
        """32 bytes over the contents of ``path``.

        Raises:
            OSError: The file cannot be read.
        """
        status = path.stat()
        key = (str(path), status.st_size, status.st_mtime_ns, status.st_ino)
        if key not in self._kept:
            if len(self._kept) >= _DIGESTS_KEPT_MAX:
                self._kept.clear()
            hasher = blake3(max_threads=blake3.AUTO)
            hasher.update_mmap(path)
            self._kept[key] = hasher.digest()
        return self._kept[key]


FILE_DIGESTS: Final = FileDigests()


def joined_digest(parts: Sequence[bytes]) -> bytes:
    """32 bytes over ``parts`` in order, each with its length, so that no boundary can move."""
    hasher = blake3()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def weights_digest(files: Sequence[Path]) -> bytes:
    """32 bytes over all weight files, in the order of their names."""
    return joined_digest([FILE_DIGESTS.digest(path) for path in sorted(files)])


def tokenizer_digest(folder: Path) -> bytes:
    """32 bytes over everything that decides which ids a text becomes.

    Raises:
        ModelFolderError: The tokenizer's configuration is not a JSON object.
    """
    present = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    parts = [part for p in present for part in (p.name.encode(), FILE_DIGESTS.digest(p))]
    config = folder / "tokenizer_config.json"
    if config.is_file():
        value = read_json_object(config)
        kept = {name: value[name] for name in value if name not in _TEMPLATE_KEYS}
        parts.extend((b"tokenizer_config.json", canonical_json(kept)))
    return joined_digest(parts)


def chat_template_digest(template: object) -> bytes:
    """32 bytes over the template in force; all zero where there is none."""
    return NO_DIGEST if not template else joined_digest([canonical_json(template)])


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        ModelFolderError: It cannot be read or is not an object.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFolderError(f"{path.name}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path.name}: not valid JSON") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path.name}: not a JSON object")
    return value


def quantisation_text(config: Mapping[str, Any]) -> str:
    """``"none"``, or the canonical description of how weights are quantised."""
    rule = config.get("quantization") or config.get("quantization_config")
    if not isinstance(rule, Mapping):
        return "none"
    scalars = {key: value for key, value in rule.items() if not isinstance(value, Mapping)}
    text = f"{scalars.get('mode', 'affine')} bits={scalars.get('bits')} " + (
        f"group={scalars.get('group_size')}"
    )
    # Rules for single layers, or of another scheme, are too long to show: their digest decides.
    plain = set(rule) <= {"mode", "bits", "group_size"}
    return text if plain else f"{text} rules={blake3(canonical_json(rule)).hexdigest()[:32]}"


def arguments_of(args: Any) -> dict[str, object]:  # noqa: ANN401  no common type
    """The arguments of a network, by name; ``args`` is a dataclass."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}


def constants_of(values: Mapping[str, object]) -> tuple[tuple[str, int], ...]:
    """Scalars of the math as bits of a double, and one entry for everything that is no scalar."""
    scalars = {
        name: f64_bits(float(value))
        for name, value in values.items()
        if isinstance(value, int | float)
    }
    rest = {name: value for name, value in values.items() if name not in scalars}
    # Strings and lists change the math too (score functions, layer patterns).
    digest = int.from_bytes(blake3(canonical_json(rest)).digest()[:8], "little")
    return tuple(sorted({**scalars, "non_scalar_arguments": digest}.items()))


def identity_of(
    folder: Path,
    weight_files: Sequence[Path],
    config: Mapping[str, Any],
    arguments: Mapping[str, object],
    layout: CacheLayout,
    chat_template: object,
) -> Identity:
    """The identity for a placeholder tenant.

    Args:
        folder: The model.
        weight_files: Its weights.
        config: Its text fields.
        arguments: What the network was built from, by name, ``model_type`` among them.
        layout: Shape of its rows.
        chat_template: The template in force.

    Raises:
        ModelFolderError: The tokenizer's configuration is damaged.
        OSError: A file cannot be read.
    """
    return Identity(
        tenant="unbound",
        weights_digest=weights_digest(weight_files),
        quantisation=quantisation_text(config),
        adapter_digest=NO_DIGEST,
        tokenizer_digest=tokenizer_digest(folder),
        chat_template_digest=chat_template_digest(chat_template),
        engine_abi=f"{ENGINE_ABI} {arguments['model_type']} {dtype_name(layout.encoding)}",
        layout=layout,
        constants=constants_of(arguments),
    )
