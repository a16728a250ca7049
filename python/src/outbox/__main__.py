from __future__ import annotations

import sys

from outbox.cli import main

sys.exit(main())
