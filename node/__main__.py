"""``kvnode``, and ``python -m node``: first an answer to Ctrl-C, then everything else.

Importing the commands takes up to a second on a busy machine. Whoever takes the command back in
that time gets one line, as later; until the commands are there nothing was begun that would have to
be ended.
"""

import os
import signal
from types import FrameType

from kvpack.errors import EXIT_INTERRUPTED


def _leave(_number: int, _frame: FrameType | None) -> None:
    # Not an exception: an import that is under way in C may swallow it, or print it.
    os.write(2, b"kvnode: error: interrupted\n")
    os._exit(EXIT_INTERRUPTED)


def main() -> None:
    """Run the command of this process."""
    signal.signal(signal.SIGINT, _leave)
    from node.cli import main as command

    signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


if __name__ == "__main__":
    main()
