"""A child without a model: answers at once, and misbehaves as its arguments say.

Arguments: ``MODE OPERATION``, and then a model's facts as JSON.
"""

from __future__ import annotations

import json
import sys
import time

SAME = {
    "steps": 10, "equal_steps": 10, "equal_tokens": 10, "states": 2, "equal_states": 2,
    "max_drift": 0.0, "finite": True, "first_difference": None,
}  # fmt: skip


def answer(request: dict, mode: str, operation: str, facts: dict) -> dict:
    if request["op"] == operation:
        if mode == "refuse":
            return {"error": "layers[0].rows: expected 8, found 7", "kind": "LayoutMismatchError"}
        if mode == "differ":
            return {"answer": {**SAME, "equal_steps": 9, "max_drift": 0.5,
                               "first_difference": "step 3"}}  # fmt: skip
        if mode == "crash":
            sys.stderr.write("Traceback\n  a line\nRuntimeError: out of memory\n")
            sys.exit(3)
        if mode == "hang":
            time.sleep(60)
    if request["op"] == "load":
        return {"answer": facts}
    if request["op"].startswith("write"):
        return {"answer": {"control": SAME, "file_bytes": 1000}}
    return {"answer": SAME}


def main() -> None:
    mode, operation, facts = sys.argv[1:]
    for line in sys.stdin:
        said = answer(json.loads(line), mode, operation, json.loads(facts))
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
