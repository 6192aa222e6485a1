"""The control plane for model weights that are already serving."""

import sys

# Where rich is installed, importing httpx imports its command line program and with it rich, click and pygments: a third of the time that a
# command takes to start. None stands for a module that cannot be imported, and httpx goes on without.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
