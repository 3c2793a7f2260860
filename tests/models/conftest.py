"""Makes the helpers beside the tests (tiny) and beside the runtime's tests (engine_machine) importable."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parent.parent / "runtime"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
