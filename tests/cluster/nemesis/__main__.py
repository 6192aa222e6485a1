from __future__ import annotations

import sys

from tests.cluster.nemesis.run import main

sys.exit(main(sys.argv[1:]))
