from __future__ import annotations

import sys

from tidemill.sim.cli import main

sys.exit(main())
