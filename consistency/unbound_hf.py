"""Which tensors of a Hugging Face directory its module leaves unused: what a publisher declares as `unbound` for the engine "hf".

Found out the way an agent binds: the base model of config.json is loaded over the mapped file, and a tensor counts as bound when some
tensor of the module lies at its address. Renamed, tied and merged names are thereby right, and no weight is read from the disk. Needs the
extra agent-hf. Never runs code that comes with the model and never asks the network.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raftmeta.core.errors import RaftmetaError


def available() -> bool:
    """Whether the libraries are there; importing them takes seconds, asking does not."""
    return all(find_spec(name) is not None for name in ("torch", "transformers", "safetensors"))


def find_unbound(root: Path, names: Sequence[str]) -> list[str]:
    """Sorted names of the tensors that the module does not take. Raises RaftmetaError bad_manifest when it cannot be built."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when the hub library is imported; a publish must not depend on a remote host
    import transformers
    from safetensors import safe_open

    library: Any = transformers  # half typed
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()
    tensors: dict[str, Any] = {}
    for path in sorted(root.rglob("[!.]*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys() if name in names})  # noqa: SIM118
    try:
        config = library.AutoConfig.from_pretrained(root, local_files_only=True, trust_remote_code=False)
        model_class = _base_model(library, config)
        module = model_class.from_pretrained(None, config=config, state_dict=dict(tensors))
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, ImportError) as cause:  # what the library raises, wrapped once
        detail = f"the module of {root / 'config.json'} cannot be built to find its unbound tensors: {type(cause).__name__}: {cause}"
        raise RaftmetaError("bad_manifest", detail) from cause
    held = {tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    return sorted(name for name, tensor in tensors.items() if tensor.numel() and tensor.data_ptr() not in held)


def _base_model(library: Any, config: Any) -> Any:
    """The class that AutoModel would choose; some families offer several, and it takes the first."""
    chosen = library.AutoModel._model_mapping[type(config)]
    return chosen[0] if isinstance(chosen, tuple) else chosen
