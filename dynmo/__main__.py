"""`python -m dynmo` is the `dynmo` command."""

import sys

from dynmo.cli import main

if __name__ == "__main__":
    sys.exit(main())
