"""`python -m inferbus.workers.cli`."""

from __future__ import annotations

import sys

from inferbus.workers.cli.main import main

sys.exit(main())
