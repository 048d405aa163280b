"""Halves the start of a2a-sdk programs: imported before it, keeps what it only may use out.

The SDK takes these packages when they are there, for databases and FastAPI; no peer needs them.
"""

import sys

for name in ("sqlalchemy", "fastapi", "rich"):
    # an import of it then raises ImportError
    sys.modules[name] = None  # type: ignore[assignment]
