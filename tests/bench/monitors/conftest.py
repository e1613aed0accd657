"""What tests of monitors share is in watched_models.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
