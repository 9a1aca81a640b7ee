"""`meshwright ...` and `python -m meshwright ...`."""

from __future__ import annotations

import sys

from .cli import run

__all__ = ["main"]


def main() -> None:
    """Run the command line and leave with its exit code."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
