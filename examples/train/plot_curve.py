"""Draw the loss curves of finished runs.

python examples/train/plot_curve.py --results examples/train/results --out loss-curve.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

RUNS = {"main": "tab:blue", "draft": "tab:orange"}


def read_log(results: Path, run: str) -> list[dict[str, float]]:
    """The lines of one run's log."""
    text = (results / f"{run}-log.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def draw(results: Path, out: Path) -> None:
    """Training loss on the left; the held-out novel and retrieval on the right."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    retrieval = right.twinx()
    for run, colour in RUNS.items():
        lines = read_log(results, run)
        scored = [line for line in lines if "bits_per_character" in line]
        steps = [line["step"] for line in scored]
        loss = [line["train_loss"] for line in lines]
        left.plot([line["step"] for line in lines], loss, color=colour, label=run)
        bits = [line["bits_per_character"] for line in scored]
        right.plot(steps, bits, color=colour, marker=".", label=f"{run}, bits per character")
        if run == "main":
            exact = [line["needle_chat"] for line in scored]
            retrieval.plot(steps, exact, color="tab:green", linestyle=":", label="retrieval, chat")
    left.axvline(1300, color="grey", linewidth=0.5)
    right.axvline(1300, color="grey", linewidth=0.5)
    left.set(xlabel="step", ylabel="training loss on novels, nats per token (with dropout)")
    right.set(xlabel="step", ylabel="held-out novel, bits per character", ylim=(1.65, 2.6))
    retrieval.set(ylabel="facts answered exactly (main)", ylim=(0, 1.05))
    left.legend()
    right.legend(loc="center right", bbox_to_anchor=(1.0, 0.62))
    retrieval.legend(loc="center right", bbox_to_anchor=(1.0, 0.45))
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    draw(arguments.results, arguments.out)


if __name__ == "__main__":
    main()
