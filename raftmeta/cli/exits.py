"""Exit codes, and what to say next for an error. Pure tables.

Scripts and cron read the code, people read the hint; both follow from the class of the error, so a new error code needs no new row.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from raftmeta.core.errors import ErrorClass, RaftmetaError


class Exit(IntEnum):
    OK = 0
    NO = 1  # the answer is no: refused, failed, diverged, a claim that did not hold
    UNAVAILABLE = 2  # incomplete: no answer in time, or not everything could be looked at
    USAGE = 3  # the command line or a configuration file is wrong, or names what does not exist
    FAULT = 4  # a defect of this program
    INTERRUPTED = 130


MEANINGS: tuple[tuple[Exit, str], ...] = (
    (Exit.OK, "done; the answer is yes"),
    (Exit.NO, "the answer is no: refused, failed, diverged, or a claim that did not hold"),
    (Exit.UNAVAILABLE, "incomplete: no answer in time; try again"),
    (Exit.USAGE, "the command line or a configuration file is wrong, or names what does not exist"),
    (Exit.FAULT, "a defect of this program"),
)


class Advised(RaftmetaError):
    """An error of which whoever raises it knows better than its code what to do next."""

    def __init__(self, code: str, detail: str, next_step: str, **params: Any) -> None:
        super().__init__(code, detail, **params)
        self.next_step = next_step


class Unfinished(Advised):
    """What was started goes on without us; says where it was last seen and how to look at it again."""

    def __init__(self, detail: str, next_step: str) -> None:
        super().__init__("unknown_outcome", detail, next_step)


class Unusable(Advised):
    """What the command line names cannot be taken, for the reason `cause`; the exit code is that of a wrong command line."""

    def __init__(self, cause: RaftmetaError, next_step: str) -> None:
        super().__init__(cause.code, cause.detail, next_step, **cause.params)


class UsageFault(Exception):
    """The command line is wrong; says what was found and what helps."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint


_HINTS = {
    "unknown_deployment": "`raftmeta status` lists the deployments; `raftmeta deploy NAME --model …` declares one",
    "unknown_model": "`raftmeta versions` lists the models; `raftmeta publish DIR --model …` makes one",
    "unknown_version": "`raftmeta versions MODEL` lists what is published",
    "unknown_rollout": "`raftmeta status` shows the running rollouts",
    "rollout_in_progress": "wait for it (`raftmeta status`), or `raftmeta abort DEPLOYMENT` before its switch is decided",
    "rollout_not_running": "`raftmeta status` shows where the deployment stands",
    "expected_version_mismatch": "someone else moved it; look with `raftmeta status` and decide again",
    "already_active": "nothing to do; `raftmeta status` shows it",
    "nothing_to_roll_back": "`raftmeta activate DEPLOYMENT VERSION` goes to any published version",
    "failover_refused": "`raftmeta failover DEPLOYMENT --to SIDE --dry-run` lists why, and what helps",
    "bad_manifest": "nothing was published; DIR holds config.json and *.safetensors at its top, as `save_pretrained` writes it",
    "version_exists": "a label keeps its bytes; publish under the next one",
    "directory_refused": "end the other process, run as the owner, or name another directory",
    "unauthenticated": "set token_file (and ca_file) in client.toml, or RAFTMETA_TOKEN_FILE",
    "forbidden": "this token's role may not do it; ask for one that may",
    "no_leader": "an election may be running; `raftmeta cluster status` shows the members",
    "no_quorum": "is a member running there? Members are named by --config FILE or RAFTMETA_CLIENT_CONFIG, a client.toml as "
    "`raftmeta init` writes it, or by --url",
    "not_applied": "nothing was changed; is a member running there? `raftmeta cluster status` shows it",
    "unknown_outcome": "it may have been applied; look with `raftmeta status` before you repeat it",
    "agent_unreachable": "`raftmeta agent --config FILE` starts it; `raftmeta agent inspect` shows what it left",
    "compacted": "start again from the present: leave --from away",
    "quota_exceeded": "delete versions that nothing names any more",
}
_UNREAD = {  # files that a client is set up with
    "client configuration": "`raftmeta init DIR` writes it as DIR/client.toml; name it with --config FILE or RAFTMETA_CLIENT_CONFIG, "
    "for example: raftmeta status --config ./cluster/client.toml",
    "token_file": "`raftmeta init DIR` writes DIR/tokens/ROLE.token; name it as token_file in client.toml, or with RAFTMETA_TOKEN_FILE",
}
_BY_CLASS = {
    ErrorClass.INVALID: "correct what the text above names, and try again",
    ErrorClass.REJECTED: "look again (`raftmeta status`) and decide",
    ErrorClass.UNAVAILABLE: "try again in a moment; `raftmeta cluster status` shows the members",
    ErrorClass.CAPACITY: "free something, then try again",
    ErrorClass.INTEGRITY: "keep the logs and call the people who run the cluster",
}


# What was typed or configured cannot be meant. An unknown name is no answer of `check`, whose 1 is a difference that was seen.
_UNKNOWN = ("unknown_deployment", "unknown_model", "unknown_node", "unknown_rollout", "unknown_version")
_USAGE = frozenset({"bad_field", "bad_name", "bad_request", *_UNKNOWN})


def hint(error: RaftmetaError) -> str:
    """What to do next."""
    if isinstance(error, Advised):
        return error.next_step
    if "untrusted" in error.params:
        return "set ca_file in client.toml to the authority that signed the members' certificates, or give the --config that names it"
    return _UNREAD.get(str(error.params.get("unread")), "") or _HINTS.get(error.code, _BY_CLASS[error.info.error_class])


def exit_code(error: RaftmetaError) -> Exit:
    if isinstance(error, Unusable) or error.code in _USAGE:
        return Exit.USAGE
    return Exit.UNAVAILABLE if error.info.error_class is ErrorClass.UNAVAILABLE else Exit.NO
