"""`python -m paceline` is the command line."""

import sys

from paceline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
