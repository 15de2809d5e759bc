"""A description of a pack, as lines for people and as one JSON object for programs."""

from __future__ import annotations

from kvpack.cli.output import table
from kvpack.describe import Description, LayerTotal
from kvpack.layout import LayerLayout
from kvpack.manifest import Manifest

_NONE = bytes(32)


def description_json(description: Description) -> dict[str, object]:
    """Everything that a pack says about itself; digests in hexadecimal."""
    header, manifest = description.header, description.manifest
    identity = header.identity
    return {
        "verified": description.verified,
        "format": "kvpack/v1",
        "tenant": header.tenant,
        "epoch": header.epoch,
        "position": manifest.position,
        "producer": manifest.producer.value,
        "window_rule": manifest.window_rule.value,
        "encoding": header.layout.encoding.value,
        "max_context_tokens": header.layout.max_context_tokens,
        "layers": [_layer_json(layer) for layer in header.layout.layers],
        "identity": {
            "digest": header.identity_digest.hex(),
            "layout_digest": header.layout_digest.hex(),
            "weights_digest": identity.weights_digest.hex(),
            "quantisation": identity.quantisation,
            "adapter_digest": _digest(identity.adapter_digest),
            "tokenizer_digest": identity.tokenizer_digest.hex(),
            "chat_template_digest": _digest(identity.chat_template_digest),
            "engine_abi": identity.engine_abi,
            "constants": {name: f"0x{bits:016x}" for name, bits in identity.constants},
        },
        "numerics": dict(manifest.numerics.values),
        "schedule": [[run.call_tokens, run.calls] for run in manifest.schedule.runs],
        "components": [component.kind.value for component in manifest.components],
        "draft": _draft_json(manifest),
        "parent": _parent_json(description),
        "foreign_ring_heads": {str(ring.layer): ring.head for ring in manifest.foreign_ring_heads},
        "classes": {
            total.chunk_class.value: {
                "chunks": total.chunks,
                "plain_bytes": total.plain_bytes,
                "stored_bytes": total.stored_bytes,
            }
            for total in description.classes
        },
        "manifest_id": description.manifest_id.hex(),
        "chunk_count": description.footer.chunk_count,
        "file_bytes": description.footer.file_bytes,
        "signed": bool(description.footer.signature_bytes),
    }


def description_lines(description: Description) -> list[str]:
    """The same for people: a few facts, the layers by shape, the chunks by class."""
    header, manifest = description.header, description.manifest
    facts = [
        ("format", "kvpack v1"),
        ("tenant", f"{header.tenant}, epoch {header.epoch}"),
        ("tokens", f"{manifest.position:,} of at most {header.layout.max_context_tokens:,}"),
        ("producer", f"{manifest.producer.value}, {header.layout.encoding.value}"),
        (
            "weights",
            f"{header.identity.weights_digest.hex()[:16]}…, {header.identity.quantisation}",
        ),
        ("identity", f"{header.identity_digest.hex()[:16]}…, {header.identity.engine_abi}"),
        ("file", f"{description.footer.file_bytes:,} bytes"),
        ("signature", "present" if description.footer.signature_bytes else "none"),
    ]
    if manifest.draft is not None:
        model = manifest.draft.identity
        facts.append(("draft", f"{model.weights_digest.hex()[:16]}…, {model.quantisation}"))
    if manifest.parent is not None:
        parent = manifest.parent
        facts.append(("parent", f"{parent.manifest_id.hex()[:16]}…, {parent.position:,} tokens"))
    layers: list[tuple[str, ...]] = [
        ("layers", "count", "window", "kv heads", "key", "value", "rope")
    ]
    layers += [_layer_row(total) for total in description.layers]
    classes = [("chunks", "count", "plain bytes", "stored bytes")]
    classes += [
        (
            total.chunk_class.value,
            str(total.chunks),
            f"{total.plain_bytes:,}",
            f"{total.stored_bytes:,}",
        )
        for total in description.classes
    ]
    lines = [f"{name:<11}{value}" for name, value in facts]
    return [*lines, "", *table(layers), "", *table(classes)]


def _layer_row(total: LayerTotal) -> tuple[str, ...]:
    layer = total.layer
    window = "-" if layer.window_tokens is None else f"{layer.window_tokens:,}"
    rope = "none (NoPE)" if layer.rope is None else f"{layer.rope.dims} dims"
    shape = (layer.kv_heads, layer.key_dim, layer.value_dim)
    return layer.kind.value, str(total.count), window, *(str(size) for size in shape), rope


def _layer_json(layer: LayerLayout) -> dict[str, object]:
    rope = layer.rope
    return {
        "kind": layer.kind.value,
        "window_tokens": layer.window_tokens,
        "kv_heads": layer.kv_heads,
        "key_dim": layer.key_dim,
        "value_dim": layer.value_dim,
        "rope": None
        if rope is None
        else {
            "theta_bits": f"0x{rope.theta_bits:016x}",
            "dims": rope.dims,
            "interleaved": rope.interleaved,
            "scaling": rope.scaling,
        },
    }


def _draft_json(manifest: Manifest) -> dict[str, object] | None:
    draft = manifest.draft
    if draft is None:
        return None
    return {
        "digest": manifest.components[-1].identity_digest.hex(),
        "weights_digest": draft.identity.weights_digest.hex(),
        "quantisation": draft.identity.quantisation,
        "engine_abi": draft.identity.engine_abi,
        "encoding": draft.layout.encoding.value,
        "layers": [_layer_json(layer) for layer in draft.layout.layers],
        "numerics": dict(draft.numerics.values),
        "schedule": [[run.call_tokens, run.calls] for run in draft.schedule.runs],
    }


def _parent_json(description: Description) -> dict[str, object] | None:
    parent = description.manifest.parent
    if parent is None:
        return None
    return {
        "manifest_id": parent.manifest_id.hex(),
        "epoch": parent.epoch,
        "position": parent.position,
        "depth": parent.depth,
    }


def _digest(value: bytes) -> str | None:
    return None if value == _NONE else value.hex()
