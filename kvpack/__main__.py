"""``kvpack``, and ``python -m kvpack``: first an answer to Ctrl-C, then everything else.

Until the commands are imported nothing was begun that would have to be ended.
"""

import os
import signal
import sys
from types import FrameType

from kvpack.errors import EXIT_INTERRUPTED


def _leave(_number: int, _frame: FrameType | None) -> None:
    # Not an exception: an import that is under way in C may swallow it, or print it.
    os.write(2, b"kvpack: error: interrupted\n")
    os._exit(EXIT_INTERRUPTED)


def main() -> int:
    """Run the command of this process; returns its exit code."""
    signal.signal(signal.SIGINT, _leave)
    from kvpack.cli import main as command

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return command()


if __name__ == "__main__":
    sys.exit(main())
