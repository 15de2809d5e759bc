"""``python -m node`` is ``kvnode``."""

from node.cli import main

if __name__ == "__main__":
    main()
