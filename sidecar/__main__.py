"""``python -m sidecar`` is ``a2a-sidecar``."""

import sys

from sidecar.cli import main

if __name__ == "__main__":
    sys.exit(main())
