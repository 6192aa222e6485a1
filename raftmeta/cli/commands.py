"""The table of commands: name -> where its code lives, one line of help, one example. Nothing is imported until a command is called.

A target is "module:callable"; the callable takes the arguments after the command's name and returns the exit code. Targets may lie in
packages above this one: they are names here, resolved at the moment of the call, so the layers stay what they are and `--help` stays fast.
"""

from __future__ import annotations

from typing import NamedTuple


class CommandInfo(NamedTuple):
    target: str
    help: str
    example: str
    group: str
    needs: str = ""  # extra of the distribution that brings what the base install lacks


START, RUN, CHANGE, LOOK = "Start here", "Run", "Change what serves", "Look and prove"
GROUPS = (START, RUN, CHANGE, LOOK)

COMMANDS: dict[str, CommandInfo] = {
    "demo": CommandInfo(
        "raftmeta.cli.demo.command:main",
        "Show one model update end to end on this machine: three zones, a real model, a killed leader",
        "raftmeta demo --report demo.json",
        START,
        "demo",
    ),
    "init": CommandInfo(
        "raftmeta.cli.init_command:main",
        "Write certificates and configuration for a cluster over N zones",
        "raftmeta init ./cluster --zones a,b,c",
        START,
    ),
    "server": CommandInfo(
        "api.main:main",
        "Run a member; without configuration a single development member on loopback",
        "raftmeta server --config ./cluster/a/server.toml",
        RUN,
    ),
    "agent": CommandInfo(
        "node_agent.main:main",
        "Run the agent of one serving node",
        "raftmeta agent --config ./cluster/agents/node-a/agent.toml",
        RUN,
        "agent-hf",
    ),
    "agent inspect": CommandInfo(
        "node_agent.inspect_command:main",
        "Show what a node holds: slots, who is inside them, arenas",
        "raftmeta agent inspect --config ./cluster/agents/node-a/agent.toml",
        LOOK,
        "agent-hf",
    ),
    "agent plan": CommandInfo(
        "node_agent.operate_commands:plan",
        "Show what a node would do next, and what it would move",
        "raftmeta agent plan --config ./cluster/agents/node-a/agent.toml",
        LOOK,
        "agent-hf",
    ),
    "agent cordon": CommandInfo(
        "node_agent.operate_commands:cordon",
        "Take a node out of readiness, or let it back with --lift",
        "raftmeta agent cordon --config ./cluster/agents/node-a/agent.toml --reason 'fan replaced'",
        RUN,
        "agent-hf",
    ),
    "agent pin": CommandInfo(
        "node_agent.operate_commands:pin",
        "Keep a node on the version that it serves, or let it obey again with --lift",
        "raftmeta agent pin search --config ./cluster/agents/node-a/agent.toml --reason 'until the audit is over'",
        RUN,
        "agent-hf",
    ),
    "agent abort": CommandInfo(
        "node_agent.operate_commands:abort",
        "Fail a running rollout on one node, and so everywhere",
        "raftmeta agent abort search --config ./cluster/agents/node-a/agent.toml --reason 'wrong weights'",
        RUN,
        "agent-hf",
    ),
    "agent reclaim": CommandInfo(
        "node_agent.reclaim_command:main",
        "Remove arenas that no process uses from a node's shared memory",
        "raftmeta agent reclaim --config ./cluster/agents/node-a/agent.toml --dry-run",
        RUN,
        "agent-hf",
    ),
    "publish": CommandInfo(
        "consistency.publish:main",
        "Publish a directory of weights as a version of a model",
        "raftmeta publish ./minilm-v2 --model minilm --label 2.0.0",
        CHANGE,
    ),
    "probe": CommandInfo(
        "node_agent.probe_command:main",
        "Run a directory of weights and write its answers down, which nodes then have to match",
        "raftmeta probe ./minilm-v2 --out probes.json",
        CHANGE,
        "agent-hf",
    ),
    "deploy": CommandInfo(
        "raftmeta.cli.deploy:deploy",
        "Declare under which name, on which nodes a model serves",
        "raftmeta deploy search --model minilm --primary a:node-a1 --standby b:node-b1",
        CHANGE,
    ),
    "activate": CommandInfo(
        "raftmeta.cli.deploy:activate",
        "Move a deployment to a version and follow the rollout",
        "raftmeta activate search 2.0.0",
        CHANGE,
    ),
    "rollback": CommandInfo(
        "raftmeta.cli.deploy:rollback",
        "Move a deployment back to the version before, which is still in memory",
        "raftmeta rollback search",
        CHANGE,
    ),
    "abort": CommandInfo(
        "raftmeta.cli.deploy:abort",
        "Abort a rollout whose switch is not decided yet",
        "raftmeta abort search",
        CHANGE,
    ),
    "failover": CommandInfo(
        "raftmeta.cli.failover:main",
        "Let the other side of a deployment take its requests, or show what speaks against it",
        "raftmeta failover search --to standby --dry-run",
        CHANGE,
    ),
    "status": CommandInfo(
        "raftmeta.cli.status:status",
        "Show which version serves where, and what is on its way",
        "raftmeta status search --json",
        LOOK,
    ),
    "versions": CommandInfo(
        "raftmeta.cli.status:versions",
        "List models, or the versions of one",
        "raftmeta versions minilm",
        LOOK,
    ),
    "watch": CommandInfo(
        "raftmeta.cli.watch:main",
        "Print every change as it is committed",
        "raftmeta watch --resource deployments,rollouts",
        LOOK,
    ),
    "check": CommandInfo(
        "consistency.main:main",
        "Compare the memory of primary and standby; exit status 0, 1 or 2",
        "raftmeta check search",
        LOOK,
    ),
    "drill side-failover": CommandInfo(
        "consistency.drill_command:main",
        "Rehearse a fail-over under requests, to the other side and back, and measure it",
        "raftmeta drill side-failover search --report drill.json",
        LOOK,
    ),
    "live": CommandInfo(
        "consistency.live_command:main",
        "Ask both sides the same, all the time, and compare their answers; exit status 0, 1 or 2",
        "raftmeta live search --for 60",
        LOOK,
    ),
    "vector": CommandInfo(
        "consistency.vector_command:main",
        "Print the vector of weights on disk: an entry for each tensor, and the root",
        "raftmeta vector ./minilm-v2 --threads 2",
        LOOK,
    ),
    "evidence": CommandInfo(
        "raftmeta.cli.evidence:main",
        "Show which bytes serve where now, by what the nodes found in their memory",
        "raftmeta evidence search",
        LOOK,
    ),
    "cluster status": CommandInfo(
        "raftmeta.cli.cluster:status",
        "Show members, leader and how far each has come",
        "raftmeta cluster status",
        LOOK,
    ),
    "cluster raise-level": CommandInfo(
        "raftmeta.cli.cluster:raise_level",
        "After an update of every member, let them write what the newer build brought",
        "raftmeta cluster raise-level",
        RUN,
    ),
}


def find(words: list[str]) -> tuple[str, list[str]] | None:
    """The command that `words` begins with, the longest name first, and what is left for it."""
    for length in (2, 1):
        name = " ".join(words[:length])
        if len(words) >= length and name in COMMANDS:
            rest = words[length:]
            # A word where a command below would stand is meant as one; those that have any take no arguments themselves.
            return None if rest and not rest[0].startswith("-") and below(name) else (name, rest)
    return None


def below(prefix: str) -> list[str]:
    """Names of the commands that begin with the word `prefix`, for instance of `cluster`."""
    return [name for name in COMMANDS if name.startswith(prefix + " ")]
