"""Section 7: what a manifest must say, in twelve steps."""

from __future__ import annotations

from typing import Any

from tests.reference.ranges import DRAFT, FINAL_LOGITS, FULL, SAMPLER, SESSION, SWA, TOKEN_IDS
from tests.reference.schemas import ELEMENT_BYTES, schedule_position
from tests.reference.verdict import need

Values = dict[str, Any]
_ENGINE, _ORACLE, _MLX_LM = 1, 2, 4


def check(manifest: Values, identity: Values, digests: list[bytes], epoch: int) -> None:
    """All steps, in order; ``digests`` are those of the target's and the draft's identity.

    Raises:
        Refused: The first that does not hold.
    """
    references, position = manifest["references"], manifest["position"]
    _distinct(references)
    kinds = [item["kind"] for item in manifest["components"]]
    need(kinds in ([1], [1, 2]), "gate.2", "components")
    layout, drafts = identity["layout"], [c["draft"] for c in manifest["components"] if c["draft"]]
    layouts = [layout, *(draft["identity"]["layout"] for draft in drafts)]
    for one in layouts:
        need(position <= one["max_context_tokens"], "gate.3", "position")
    half = any(one["encoding"] != 3 for one in layouts)
    need(manifest["producer"] != _ORACLE or not half, "gate.4", "oracle", "layout_mismatch")
    _components(manifest, identity, digests)
    for item in (manifest, *drafts):
        total = schedule_position(item["schedule"])
        unknown = total == 0 and manifest["producer"] != _ENGINE
        need(total == position or unknown, "gate.6", "schedule")
    first = _first_position(manifest)
    _ring_heads(manifest, layout)
    parent = manifest["parent"]
    need(parent is None or first < position, "gate.8", "parent")
    for reference in references:
        _reference(reference, layouts, position, epoch)
    _parts(references)
    _token_ids(references, first, position)
    _coverage([r for r in references if r["chunk_class"] in (FULL, SWA)], layout, first, position)
    if drafts:
        _coverage([r for r in references if r["chunk_class"] == DRAFT], layouts[1], 0, position)


def _first_position(manifest: Values) -> int:
    return manifest["parent"]["position"] if manifest["parent"] is not None else 0


def _distinct(references: list[Values]) -> None:
    names = [
        (r["chunk_class"], tuple(r["layers"]), r["first_position"], r["token_count"], r["part"])
        for r in references
    ]
    need(len(set(names)) == len(names), "gate.1", "two references of one range")
    seals = {r["seal_id"] for r in references}
    need(len(seals) == len(names), "gate.1", "two references of one seal id")


def _components(manifest: Values, identity: Values, digests: list[bytes]) -> None:
    target, *others = manifest["components"]
    same = target["identity_digest"] == digests[0]
    need(same, "gate.5", "the target is another model", "identity_mismatch")
    for component in others:
        draft = component["draft"]["identity"]
        need(component["identity_digest"] == digests[1], "gate.5", "not the draft's digest")
        need(draft["tenant"] == identity["tenant"], "gate.5", "a draft of another tenant")
        same = draft["tokenizer_digest"] == identity["tokenizer_digest"]
        need(same, "gate.5", "a draft of other tokens", "identity_mismatch")
    drafts = any(r["chunk_class"] == DRAFT for r in manifest["references"])
    need(bool(others) or not drafts, "gate.5", "draft chunks of no draft")


def _ring_heads(manifest: Values, layout: Values) -> None:
    heads = manifest["foreign_ring_heads"]
    need(not heads or manifest["producer"] == _MLX_LM, "gate.7", "ring heads")
    layers = [head["layer"] for head in heads]
    need(layers == sorted(set(layers)), "gate.7", "ring heads do not ascend")
    for head in heads:
        known = head["layer"] < len(layout["layers"])
        need(known, "gate.7", "no such layer", "layout_mismatch")
        layer = layout["layers"][head["layer"]]
        need(layer["kind"] == 1, "gate.7", "a ring head of no ring", "layout_mismatch")
        held = min(manifest["position"], layer["window_tokens"])
        need(head["head"] < held, "gate.7", "ring head beyond the rows", "layout_mismatch")


def _reference(reference: Values, layouts: list[Values], position: int, epoch: int) -> None:
    trimmed = reference["first_used"] or reference["count_used"]
    need(not trimmed, "gate.9", "a trimmed reference")
    need(reference["epoch"] <= epoch, "gate.9", "epoch")
    kind, first = reference["chunk_class"], reference["first_position"]
    if kind in (FULL, SWA):
        _rows(reference, layouts[0], 2 if kind == FULL else 1)
    elif reference["layers"]:
        known = reference["layers"][0] < len(layouts[1]["layers"])
        need(known, "gate.9", "no such layer of the draft", "layout_mismatch")
        _rows(reference, layouts[1], layouts[1]["layers"][reference["layers"][0]]["kind"])
    if kind == FINAL_LOGITS:
        need(first + 1 == position, "gate.9", "logits of another position")
    if kind in (SAMPLER, SESSION) or (kind == DRAFT and not reference["layers"]):
        need(first == position, "gate.9", "a state of another position")


def _rows(reference: Values, layout: Values, expected: int) -> None:
    row = 0
    for index in reference["layers"]:
        good = index < len(layout["layers"]) and layout["layers"][index]["kind"] == expected
        need(good, "gate.9", f"layer {index}", "layout_mismatch")
        row += row_bytes(layout, layout["layers"][index])
    plain = row * reference["token_count"]
    need(plain == reference["plain_bytes"], "gate.9", "plaintext bytes", "layout_mismatch")


def row_bytes(layout: Values, layer: Values) -> int:
    """Bytes of one token's keys and values in one layer."""
    elements = layer["kv_heads"] * (layer["key_dim"] + layer["value_dim"])
    return int(elements * ELEMENT_BYTES[layout["encoding"]])


def _parts(references: list[Values]) -> None:
    following: dict[tuple[Any, ...], int] = {}
    for r in references:
        if r["chunk_class"] not in (SAMPLER, DRAFT, SESSION):
            continue
        payload = (r["chunk_class"], tuple(r["layers"]), r["first_position"], r["token_count"])
        need(r["part"] == following.get(payload, 0), "gate.10", "parts out of order")
        following[payload] = r["part"] + 1


def _token_ids(references: list[Values], first: int, position: int) -> None:
    for r in references:
        if r["chunk_class"] == TOKEN_IDS:
            need(r["first_position"] == first, "gate.11", "token ids", "layout_mismatch")
            first += r["token_count"]
    need(first == position, "gate.11", "token ids end elsewhere", "layout_mismatch")


def _coverage(references: list[Values], layout: Values, first: int, position: int) -> None:
    ranges: list[list[tuple[int, int]]] = [[] for _ in layout["layers"]]
    for r in references:
        for index in r["layers"]:
            ranges[index].append((r["first_position"], r["first_position"] + r["token_count"]))
    for layer, found in zip(layout["layers"], ranges, strict=True):
        window = layer["window_tokens"] or position
        at = max(first, position - window, 0)
        for begin, end in sorted(found):
            need(begin == at, "gate.12", "rows missing, doubled or extra", "layout_mismatch")
            at = end
        need(at == position, "gate.12", "rows missing or extra", "layout_mismatch")
