"""The engines of this build by the name that a manifest gives them. Loads torch and transformers."""

from __future__ import annotations

from node_agent.engine.hf import HfEngine
from node_agent.engine.torch_module import TorchModuleEngine
from node_agent.loading import Engines

ENGINES: Engines = {"hf": HfEngine, "torch_module": TorchModuleEngine}
