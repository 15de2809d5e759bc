"""Draws what ``perf script`` prints as a picture: time from left to right, callers below callees.

    perf record -g --call-graph dwarf,8192 -F 399 -p PID
    perf script -F comm,tid,ip,sym,dso --no-inline | python -m bench.profiles TITLE > picture.svg

The interpreter's own frames, and those of libraries without symbols, are drawn as one each.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

_WIDTH: Final = 1000.0
_ROW: Final = 17
_NARROWEST: Final = 0.004
_LETTER: Final = 6.4
_COLOURS: Final = {
    "kernel": "#d9a38f",
    "gRPC": "#8fb8d9",
    "cipher": "#d9cf8f",
    "BLAKE3": "#c7b1df",
    "numpy": "#a8d9a0",
    "MLX": "#8fd9cf",
    "libc": "#d0d0d0",
    "Python": "#f0c27b",
}


@dataclass(slots=True)
class Frame:
    """One box: how many samples, and what was called from it."""

    samples: int = 0
    callees: dict[str, Frame] = field(default_factory=dict)


def stacks(lines: Iterable[str]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """``(thread, [(symbol, library), ...])`` of each sample, the innermost frame first."""
    thread, frames = "", []
    for line in lines:
        words = line.split()
        if not words:
            if thread:
                yield thread, frames
            thread, frames = "", []
        elif not line.startswith("\t"):
            thread = words[0]
        else:
            library = words[-1].strip("()").rsplit("/", 1)[-1]
            frames.append((words[1].split("+")[0], library))
    if thread:
        yield thread, frames


def _box(symbol: str, library: str) -> str:
    libraries = (("kernel", "kernel"), ("cygrpc", "gRPC"), ("blake3", "BLAKE3"), ("libmlx", "MLX"))
    for part, name in libraries:
        if part in library:
            return name
    if library.startswith("_rust") or "libcrypto" in library:
        return "cipher"
    if "multiarray" in library:
        return "numpy"
    if library.startswith("libc.so"):
        return f"libc {symbol}" if "mem" in symbol else "libc"
    if symbol.startswith(("PyBytes_From", "stringlib_bytes_join", "gc_collect", "PyBuffer_To")):
        return f"Python {symbol}"
    return "Python"


def _path(frames: list[tuple[str, str]]) -> list[str]:
    """Boxes of one sample, outermost first."""
    names = [_box(*frame) for frame in reversed(frames)]
    if names and names[0] not in ("libc", "Python"):
        # Assembler without unwind tables: nobody knows what called it.
        names = names[-1:]
    return [name for name in names[:-1] if name != "libc"] + names[-1:]


def fold(samples: Iterable[tuple[str, list[tuple[str, str]]]]) -> Frame:
    """All samples as one tree below one root."""
    root = Frame()
    for thread, frames in samples:
        root.samples += 1
        at, before = root, ""
        for name in (f"thread {thread}", *_path(frames)):
            if name != before:
                at = at.callees.setdefault(name, Frame())
                at.samples += 1
            before = name
    return root


def draw(title: str, root: Frame) -> str:
    """The tree as SVG."""
    boxes: list[str] = []
    deepest = _draw(root, root.samples, 0.0, 0, boxes)
    height = (deepest + 2) * _ROW
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:.0f} {height}" '
        f'font-family="sans-serif" font-size="11">'
    )
    name = f'<text x="4" y="12">{html.escape(title)}: {root.samples} samples</text>'
    return "\n".join((head, name, *boxes, "</svg>")) + "\n"


def _draw(frame: Frame, total: int, left: float, depth: int, boxes: list[str]) -> int:
    deepest = depth
    for name, callee in sorted(frame.callees.items(), key=lambda one: -one[1].samples):
        share = callee.samples / total
        if share < _NARROWEST:
            continue
        width, top = share * _WIDTH, (depth + 1) * _ROW
        colour = _COLOURS.get(name.split()[0], "#e8e8e8")
        text = f"{name} {100 * share:.1f} %"
        shown = text[: int(width / _LETTER)] if width > 3 * _LETTER else ""
        boxes.append(
            f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_ROW - 1}" '
            f'fill="{colour}"><title>{html.escape(text)}</title></rect>'
            f'<text x="{left + 2:.1f}" y="{top + 12}">{html.escape(shown)}</text>'
        )
        deepest = max(deepest, _draw(callee, total, left, depth + 1, boxes))
        left += width
    return deepest


if __name__ == "__main__":
    sys.stdout.write(draw(sys.argv[1], fold(stacks(sys.stdin))))
