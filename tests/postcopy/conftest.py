# SPDX-License-Identifier: GPL-2.0-or-later
import sys
from pathlib import Path

for name in ("guest", "linux-guest"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / name))
