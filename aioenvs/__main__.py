"""Run the command line by ``python -m aioenvs``."""

import sys

from aioenvs.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
