"""TLS of the serving port: the same certificate handling as the members' ports, for clients of more ages."""

from __future__ import annotations

import ssl

from node_agent.config import AgentConfig
from raftmeta.security.server_tls import LOOK_S, ServerTls

OLDEST = ssl.TLSVersion.TLSv1_2  # members and agents speak 1.3 among each other; clients of models need not


def server_tls(config: AgentConfig, look_s: float = LOOK_S) -> ServerTls | None:
    """None without a certificate. Raises RaftmetaError bad_field for files that cannot be used, or that do not fit each other."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    return ServerTls(config.tls_cert, config.tls_key, OLDEST, look_s)
