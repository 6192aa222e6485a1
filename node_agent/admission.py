"""Who may ask a node what: the bearer token of a request against the action of its route, before anything of its body is read.

The table of principals is the members' (`raftmeta.security`): digests of tokens with names and roles, read again when the file is replaced.
Without one everybody may ask everything; the configuration allows that on loopback, and elsewhere only to who asks for it in so many words.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from node_agent.config import AgentConfig
from node_agent.serve import Header, ServeError
from raftmeta.core.errors import RaftmetaError
from raftmeta.security.roles import ACTIONS, permitted
from raftmeta.security.tokens import Authorizer, bearer_token

CHALLENGE = b'Bearer realm="raftmeta"'


class Admission:
    def __init__(self, config: AgentConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises RaftmetaError bad_field for a file of principals that cannot be used."""
        self._authorizer = None if config.principals_file is None else Authorizer(config.principals_file, clock)
        self._open = {
            action for action, is_open in (("health", config.health_without_token), ("metrics", config.metrics_without_token)) if is_open
        }

    def admit(self, action: str, headers: Iterable[Header]) -> None:
        """Raises ServeError: 401 for who is nobody we know, 403 for who may not."""
        if self._authorizer is None or action in self._open:
            return
        given = [value for name, value in headers if name == b"authorization"]
        try:
            if len(given) > 1:
                raise RaftmetaError("unauthenticated", f"expected one authorization header, found {len(given)}")
            caller = self._authorizer.authenticate(bearer_token(given[0]) if given else "")
        except RaftmetaError as fault:
            challenge = CHALLENGE + b', error="invalid_token"' if given else CHALLENGE
            raise ServeError(401, fault.detail, headers=((b"www-authenticate", challenge),)) from fault
        if not permitted(caller, action):
            needed = " or ".join(sorted(ACTIONS[action]))
            challenge = CHALLENGE + b', error="insufficient_scope"'
            detail = f"{caller.name} has role {caller.role}; this takes {needed}"
            raise ServeError(403, detail, headers=((b"www-authenticate", challenge),))
