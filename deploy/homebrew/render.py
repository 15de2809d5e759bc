"""Write the Homebrew formula for an sdist.

python deploy/homebrew/render.py --url URL --homepage URL dist/kvpack-0.1.0.tar.gz > kvpack.rb
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from pathlib import Path

TEMPLATE = Path(__file__).with_name("kvpack.rb.in")

#: What the formula installs beside the format: the node with its model backend, and S3.
EXTRAS = "node,s3"


def render(sdist: Path, url: str, homepage: str) -> str:
    """The formula for ``sdist``, which is to be found at ``url``.

    Raises:
        ValueError: The file is not named as an sdist of ours, or a URL cannot stand in quotes.
    """
    named = re.fullmatch(r"kvpack-(\d+\.\d+\.\d+)\.tar\.gz", sdist.name)
    if named is None:
        raise ValueError(f"{sdist.name}: expected kvpack-VERSION.tar.gz")
    for given in (url, homepage):
        if not re.fullmatch(r"(https|file)://[A-Za-z0-9._~/%+:@-]+", given):
            raise ValueError(f"{given!r}: expected an https:// or file:// URL")
    values = {
        "URL": url,
        "HOMEPAGE": homepage,
        "VERSION": named[1],
        "SHA256": hashlib.sha256(sdist.read_bytes()).hexdigest(),
        "EXTRAS": EXTRAS,
    }
    return re.sub(r"@([A-Z0-9]+)@", lambda match: values[match[1]], TEMPLATE.read_text())


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", required=True, help="Where the sdist is fetched from.")
    parser.add_argument("--homepage", required=True)
    parser.add_argument("sdist", type=Path)
    given = parser.parse_args()
    try:
        sys.stdout.write(render(given.sdist, given.url, given.homepage))
    except (OSError, ValueError) as error:
        sys.exit(f"render: error: {error}")


if __name__ == "__main__":
    main()
