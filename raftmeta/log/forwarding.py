"""Commands that a follower hands to its leader, and what the leader answers. Both sides of it, since any member may be either.

The leader judges each command itself, as if the follower were a client: it decodes it, and asks for its authorization and for the feature
level that it needs again. Answers are collected and leave with `flush`, which the replica calls after its sync; what was sent to a leader
waits for them in `Proposals`. Belongs to the replica's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from raftmeta.core.commands import Body
from raftmeta.core.errors import CODES
from raftmeta.core.types import Outcome
from raftmeta.log.engine import Engine
from raftmeta.log.levels import Levels
from raftmeta.log.messages import Forward, ForwardReply, Proposal, ProposalReply, bounded_depth
from raftmeta.log.proposals import MAX_QUEUED, Proposals, Result, Sink, decode_body, encode_body
from raftmeta.log.setup import LEADER

MAX_FORWARD_BYTES = 4 << 20
MAX_REPLY_BYTES = 4 << 20  # of answers in one message
REPLY_BYTES = 64  # of an answer without its outcome, at most: code, numbers and their frames
MAX_NAMES = 1024  # characters of key, principal and source together; apply refuses less, this bounds an entry

Authorize = Callable[[str, Body], bool]  # principal and command


class Owner(Protocol):
    """The replica, as far as forwarding needs it."""

    engine: Engine
    proposals: Proposals
    levels: Levels

    def propose(self, proposal: Proposal, timeout_s: float, sink: Sink) -> None: ...
    def send(self, peer: str, message: Forward | ForwardReply) -> None: ...


class Forwarding:
    def __init__(self, owner: Owner, authorize: Authorize, timeout_s: float) -> None:
        self._owner, self._authorize, self._timeout_s = owner, authorize, timeout_s
        self._replies: dict[str, list[ProposalReply]] = {}

    # a follower's side

    def pass_on(self, leader: str) -> None:
        """Send what is queued to the leader."""
        proposals = self._owner.proposals.take_forwards(MAX_FORWARD_BYTES)
        if proposals:
            self._owner.send(leader, Forward(tuple(proposals)))

    def on_reply(self, message: ForwardReply) -> None:
        for reply in message.replies:
            self._owner.proposals.answered(reply.id, _result_of(reply))

    # a leader's side

    def on_forward(self, peer: str, message: Forward) -> None:
        if len(message.proposals) > MAX_QUEUED:
            return  # no member of ours sends so many; to judge them would cost this one its term
        for proposal in message.proposals:
            sink = self._reply_to(peer, proposal.id)
            if self._owner.engine.role != LEADER:
                sink(Result("no_leader"))
                continue
            if len(proposal.request_id) + len(proposal.principal) + len(proposal.source) > MAX_NAMES:
                sink(Result("bad_request"))
                continue
            try:
                body = decode_body(proposal.body)
            except msgspec.MsgspecError:
                sink(Result("bad_request"))
                continue
            if not self._authorize(proposal.principal, body):
                sink(Result("forbidden"))
            elif (refusal := self._owner.levels.refusal(body)) is not None:
                # A new leader may not have applied yet that the level was raised: until it has, the command is to come again.
                sink(Result("ok", refusal) if self._owner.engine.may_serve_reads else Result("no_leader"))
            else:
                # Encoded again: what this build did not read of it must not reach the log, where replicas would judge it differently.
                understood = msgspec.structs.replace(proposal, body=encode_body(body))
                self._owner.propose(understood, self._timeout_s, sink)

    def flush(self) -> None:
        """Send the answers that came together, in as few messages to each peer as frames allow."""
        for peer, replies in sorted(self._replies.items()):
            part: list[ProposalReply] = []
            size = 0
            for reply in replies:
                size += len(reply.outcome) + REPLY_BYTES
                if part and size > MAX_REPLY_BYTES:
                    self._owner.send(peer, ForwardReply(tuple(part)))
                    part, size = [], len(reply.outcome) + REPLY_BYTES
                part.append(reply)
            self._owner.send(peer, ForwardReply(tuple(part)))
        self._replies.clear()

    def _reply_to(self, peer: str, proposal_id: int) -> Sink:
        def sink(result: Result) -> None:
            outcome = _outcome_encoder.encode(result.outcome) if result.outcome is not None else b""
            self._replies.setdefault(peer, []).append(ProposalReply(proposal_id, result.code, outcome, result.log_index))

        return sink


def _result_of(reply: ProposalReply) -> Result:
    if reply.code != "ok":
        return Result(reply.code if reply.code in CODES else "unknown_outcome")
    try:
        return Result("ok", bounded_depth(_outcome_decoder, reply.outcome), reply.index)
    except msgspec.MsgspecError:
        return Result("unknown_outcome")


_outcome_encoder = msgspec.msgpack.Encoder()
_outcome_decoder = msgspec.msgpack.Decoder(Outcome)
