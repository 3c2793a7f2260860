"""Makes the helpers beside the tests (toy_runner, engine_machine, toy_tokenizer) importable."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
