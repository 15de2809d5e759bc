"""Identity and numerics of a loaded model.

Identity is over contents: weights, tokenizer, template, scalar constants as bits. A path or a name
never enters it. The numerics fingerprint is over the machine and the build.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from blake3 import blake3
from numpy.lib.introspect import opt_func_info

from engine import backend
from engine.dtypes import dtype_name, mlx_dtype
from engine.errors import ModelFolderError
from engine.folder import TOKENIZER_FILES
from engine.mapping import canonical_json, f64_bits
from engine.origins import PlaneLayout
from kvpack.identity import DIGEST_BYTES, Identity, NumericsFingerprint
from kvpack.layout import CacheLayout

#: Raised whenever this engine's own arithmetic or call shapes change bits.
NUMERICS_REVISION: Final = "1"

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


def constants_of(args: Any) -> tuple[tuple[str, int], ...]:  # noqa: ANN401  no common type
    """Scalars of the math as bits of a double, and one entry for everything that is no scalar."""
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
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
    args: Any,  # noqa: ANN401
    layout: CacheLayout,
    chat_template: object,
) -> Identity:
    """The identity for a placeholder tenant.

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
        engine_abi=f"{ENGINE_ABI} {args.model_type} {dtype_name(layout.encoding)}",
        layout=layout,
        constants=constants_of(args),
    )


def _numpy_kernels() -> str:
    """The instruction sets for which NumPy took its doubles' ``add`` and ``exp`` on this processor.

    Sampling above temperature 0 is made of these two, on the host; a GPU's name says nothing of
    them. What else it calls gives the same bits everywhere.
    """
    found = opt_func_info(func_name="^(add|exp)$", signature="float64")
    taken = {
        name: sorted({kernel["current"] for kernel in kernels.values()})
        for name, kernels in found.items()
    }
    return " ".join(f"{name}={'/'.join(kernels)}" for name, kernels in sorted(taken.items()))


def _fused(left: mx.array, right: mx.array) -> mx.array:
    return left * mx.sigmoid(left) * right + left


def _compiled_bits(dtype: mx.Dtype) -> str:
    """What a fused operation makes of 1,024 numbers here: eight hexadecimal digits of a digest.

    MLX writes and compiles fused operations at run time. Where it finds no compiler the same
    operations run one by one, and a compiler may round once where they round twice: no version of
    MLX says which.
    """
    left = mx.arange(1024, dtype=mx.float32) / 97.0 - 5.0
    right = mx.arange(1024, 0, -1, dtype=mx.float32) / 61.0 - 8.0
    fused: Any = mx.compile(_fused)
    bits = fused(left.astype(dtype), right.astype(dtype)).view(mx.uint8)
    return blake3(bytes(bits.tolist())).hexdigest()[:8]


def numerics_of(layout: CacheLayout, plane_layout: PlaneLayout) -> NumericsFingerprint:
    """The fingerprint of this process."""
    values = {
        "backend": backend.backend_name(),
        "compiled": _compiled_bits(mlx_dtype(layout.encoding)),
        "device": backend.device_description(),
        "dtype": dtype_name(layout.encoding),
        "mlx": importlib.metadata.version("mlx"),
        "mlx_lm": importlib.metadata.version("mlx-lm"),
        "numpy": np.__version__,
        "numpy_kernels": _numpy_kernels(),
        "numerics_revision": NUMERICS_REVISION,
        "os": f"{platform.system()} {platform.release()}",
        "plane_layout": plane_layout.value,
        **dict(backend.switch_values()),
    }
    return NumericsFingerprint(tuple(sorted(values.items())))
