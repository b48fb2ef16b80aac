"""`python -m workers.cli`."""

from __future__ import annotations

import sys

from workers.cli.main import main

sys.exit(main())
