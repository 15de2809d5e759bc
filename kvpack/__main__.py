"""``python -m kvpack`` is the ``kvpack`` command."""

import sys

from kvpack.cli import main

sys.exit(main())
