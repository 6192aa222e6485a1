"""What `raftmeta init` does: certificates, configuration and tokens of a new cluster in one directory.

`plan_cluster` decides everything that can be wrong (names, hosts, ports) and returns a value; `init_cluster` writes it into a temporary
directory beside the target and renames it, so that there is a whole cluster directory or none. It never touches an existing one. What an
`init` that was killed left beside the target holds the authority's key: the next one of the same directory removes it.

    DIR/authority/            ca.pem, ca.key: keep the key away from the members
    DIR/<member>/             server.toml and what it names; copy it to the member's machine
    DIR/agents/<node>/        agent.toml and what it names
    DIR/tokens/, client.toml  for people, checks from cron and clients of the models; the CLI takes client.toml by --config or
                              RAFTMETA_CLIENT_CONFIG
"""

from __future__ import annotations

import datetime as dt
import errno
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from raftmeta.addresses import is_host, is_ip, is_loopback, join_address
from raftmeta.cli.exits import Unusable
from raftmeta.cli.init_directory import ended_by_signal, remove_left_over, working_directory
from raftmeta.cli.init_files import Folder, agent_toml, client_toml, principals_toml, server_toml
from raftmeta.config import MAX_MEMBERS
from raftmeta.core.errors import RaftmetaError
from raftmeta.core.manifest import NAME
from raftmeta.durable import DiskError, OsDisk
from raftmeta.log.configuration import MemberSpec, configuration_of
from raftmeta.log.hello import member_uri
from raftmeta.log.marker import Marker, write_marker
from raftmeta.security.certificates import AUTHORITY_DAYS, LEAF_DAYS, Pem, Subject, Validity, issue, new_authority
from raftmeta.security.roles import AGENT_PREFIX, Principal, Role
from raftmeta.security.tokens import new_token

DEFAULT_BASE_PORT = 7400
PEER_OFFSET = 100  # peer ports lie this far above the API ports, agents' twice as far
AGENT_OFFSET = 200
MAX_AGENTS = 64
LOCAL_HOST = "127.0.0.1"
EXAMPLE = "for example: raftmeta init ./cluster --zones a,b,c --hosts h1,h2,h3 --agent a:node-a@g1 --agent b:node-b@g2"
HOLDERS = (Role.ADMIN, Role.OPERATOR, Role.PUBLISHER, Role.READER, Role.CHECKER, Role.INFERENCE)  # of a token each, beside the agents

_RESERVED = frozenset({"agents", "authority", "tokens"})


class InitOptions(msgspec.Struct, frozen=True):
    """What may be asked for beside the zones."""

    hosts: tuple[str, ...] = ()  # one per zone in the order of the zones; none: everything on loopback
    agents: tuple[str, ...] = ()  # ZONE:NODE or ZONE:NODE@HOST
    base_port: int = DEFAULT_BASE_PORT  # 0: free ports of this machine
    arena_dir: Path = Path("/dev/shm")  # of the agents
    artifact_roots: tuple[Path, ...] = ()  # directories from which agents may fetch


class PlannedMember(msgspec.Struct, frozen=True):
    spec: MemberSpec
    host: str
    api_listen: str
    peer_listen: str


class PlannedAgent(msgspec.Struct, frozen=True):
    node: str
    zone: str
    host: str
    listen: str


class ClusterPlan(msgspec.Struct, frozen=True):
    cluster_id: str
    members: tuple[PlannedMember, ...]
    agents: tuple[PlannedAgent, ...]

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(member.spec.api_url for member in self.members)


class InitResult(msgspec.Struct, frozen=True):
    directory: Path
    cluster_id: str
    servers: tuple[Path, ...]  # server.toml of each member
    agents: tuple[Path, ...]  # agent.toml of each agent
    client: Path  # client.toml of the administrator
    urls: tuple[str, ...]


def run(directory: Path, zones: Sequence[str], options: InitOptions | None = None) -> InitResult:
    """The whole of `raftmeta init` for a caller with clock and randomness of the machine. Raises RaftmetaError."""
    return init_cluster(directory, zones, options or InitOptions(), dt.datetime.now(dt.UTC))


def init_cluster(directory: Path, zones: Sequence[str], options: InitOptions, now: dt.datetime) -> InitResult:
    """Write the cluster directory. Raises RaftmetaError `bad_field` when something stands there or the request is wrong."""
    target = directory.absolute()
    if target.exists() or target.is_symlink():
        raise _exists(target)
    if not str(target).isprintable():
        raise RaftmetaError("bad_field", f"the directory name {str(target)!r} has characters that do not print")
    plan = plan_cluster(zones, options)
    disk = OsDisk()
    disk.make_directory(target.parent)
    remove_left_over(target)
    with ended_by_signal(), working_directory(target) as working:
        _write_cluster(Folder(working), target, plan, options, now)
        try:
            disk.rename(working, target)
        except DiskError as cause:
            if cause.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):  # another `init` of this directory was faster
                raise _exists(target) from cause
            raise
    disk.sync_directory(target.parent)
    return InitResult(
        directory=target,
        cluster_id=plan.cluster_id,
        servers=tuple(target / member.spec.id / "server.toml" for member in plan.members),
        agents=tuple(target / "agents" / agent.node / "agent.toml" for agent in plan.agents),
        client=target / "client.toml",
        urls=plan.urls,
    )


def _exists(target: Path) -> RaftmetaError:
    fault = RaftmetaError("bad_field", f"{target} exists already; init makes a new directory and never changes one that is there")
    return Unusable(
        fault, f"go on with what it holds (`ls {target}`), or name another one, for example: raftmeta init {target}-2 --zones a,b,c"
    )


def plan_cluster(zones: Sequence[str], options: InitOptions) -> ClusterPlan:
    """Names, addresses and ports. Raises RaftmetaError `bad_field` that lists every fault."""
    hosts = options.hosts or (LOCAL_HOST,) * len(zones)
    parsed = [_parse_agent(text) for text in options.agents]
    faults = [*_zone_faults(zones), *_host_faults(zones, hosts), *_agent_faults(parsed, options.agents, zones)]
    if not 0 <= options.base_port <= 65535 - AGENT_OFFSET - MAX_AGENTS:
        faults.append(f"base port {options.base_port} is outside 0..{65535 - AGENT_OFFSET - MAX_AGENTS}")
    if faults:
        raise Unusable(RaftmetaError("bad_field", "; ".join(faults)), EXAMPLE)
    ports = _ports(options.base_port, 2 * len(zones) + len(parsed))
    members = [_plan_member(zones, hosts, number, ports) for number in range(len(zones))]
    host_of_zone = dict(zip(reversed(zones), reversed(hosts), strict=True))  # the first host of a repeated zone
    used: Counter[str] = Counter()
    agents = []
    for number, (zone, node, host) in enumerate(parsed):
        host = host or host_of_zone[zone]
        port = ports("agent", used[host], 2 * len(zones) + number)
        used[host] += 1
        agents.append(PlannedAgent(node, zone, host, join_address(_bind_host(host), port)))
    return ClusterPlan(f"rm-{secrets.token_hex(8)}", tuple(members), tuple(agents))


def _plan_member(zones: Sequence[str], hosts: Sequence[str], number: int, ports: Callable[[str, int, int], int]) -> PlannedMember:
    zone, host = zones[number], hosts[number]
    repeat = zones[:number].count(zone)
    beside = hosts[:number].count(host)
    api_port, peer_port = ports("api", beside, 2 * number), ports("peer", beside, 2 * number + 1)
    spec = MemberSpec(
        id=f"{zone}-{repeat + 1}" if repeat else zone,
        zone=zone,
        peer_address=join_address(host, peer_port),
        api_url=f"https://{join_address(host, api_port)}",
    )
    bind = _bind_host(host)
    return PlannedMember(spec, host, join_address(bind, api_port), join_address(bind, peer_port))


def _ports(base: int, count: int) -> Callable[[str, int, int], int]:
    """Ports by kind and place on the host, or free ones by number."""
    if base == 0:
        free = free_ports(count)
        return lambda kind, beside, number: free[number]
    offsets = {"api": 0, "peer": PEER_OFFSET, "agent": AGENT_OFFSET}
    return lambda kind, beside, number: base + offsets[kind] + beside


def free_ports(count: int) -> tuple[int, ...]:
    """Ports of loopback that were free a moment ago, all different."""
    held = [socket.create_server((LOCAL_HOST, 0)) for _ in range(count)]
    try:
        return tuple(int(sock.getsockname()[1]) for sock in held)
    finally:
        for sock in held:
            sock.close()


def _bind_host(host: str) -> str:
    """What a process on that host binds to: its address, or every address when the host is known by name."""
    return host if is_ip(host) or is_loopback(host) else "0.0.0.0"


def _zone_faults(zones: Sequence[str]) -> list[str]:
    faults = [f"zone {zone[:130]!r} is outside [a-z0-9][a-z0-9._-]{{0,127}}" for zone in zones if not NAME.match(zone)]
    faults += [f"zone name {zone!r} is reserved" for zone in zones if zone in _RESERVED]
    if not 1 <= len(zones) <= MAX_MEMBERS:
        faults.append(f"{len(zones)} zones, expected 1..{MAX_MEMBERS}")
    names = Counter(f"{zone}-{zones[:n].count(zone) + 1}" if zone in zones[:n] else zone for n, zone in enumerate(zones))
    return faults + [f"member {name!r} would exist twice" for name, times in names.items() if times > 1]


def _host_faults(zones: Sequence[str], hosts: Sequence[str]) -> list[str]:
    faults = [f"host {host[:255]!r} is no DNS name or IP address" for host in hosts if not is_host(host)]
    if len(hosts) != len(zones):
        faults.append(f"{len(hosts)} hosts for {len(zones)} zones, expected one each in the same order")
    return faults


def _parse_agent(text: str) -> tuple[str, str, str]:
    place, _, host = text.partition("@")
    zone, _, node = place.partition(":")
    return zone, node, host


def _agent_faults(agents: Sequence[tuple[str, str, str]], texts: Sequence[str], zones: Sequence[str]) -> list[str]:
    faults = []
    for (zone, node, host), text in zip(agents, texts, strict=True):
        if not NAME.match(node) or (host and not is_host(host)) or (text.endswith("@")):
            faults.append(f"agent {text[:300]!r} is not ZONE:NODE or ZONE:NODE@HOST")
        elif zone not in zones:
            faults.append(f"agent {text[:300]!r} names a zone that is not among {', '.join(zones)}")
    nodes = Counter(node for _, node, _ in agents)
    faults += [f"agent node {node!r} is given {times} times" for node, times in nodes.items() if times > 1]
    if len(agents) > MAX_AGENTS:
        faults.append(f"{len(agents)} agents, expected at most {MAX_AGENTS}; add more with their own certificates later")
    return faults


def _write_cluster(folder: Folder, target: Path, plan: ClusterPlan, options: InitOptions, now: dt.datetime) -> None:
    authority = new_authority(plan.cluster_id, Validity.days(now, AUTHORITY_DAYS))
    keys = folder.sub("authority")
    keys.write("ca.pem", authority.certificate, public=True)
    keys.write("ca.key", authority.key)
    tokens = {Principal(role.value, role): new_token() for role in HOLDERS}
    tokens |= {Principal(AGENT_PREFIX + agent.node, Role.AGENT): new_token() for agent in plan.agents}
    purses = folder.sub("tokens")
    for role in HOLDERS:
        purses.write(f"{role.value}.token", f"{tokens[Principal(role.value, role)]}\n".encode())
    validity = Validity.days(now, LEAF_DAYS)
    principals = principals_toml(tokens)
    for member in plan.members:
        _write_member(folder.sub(member.spec.id), member, plan, (authority, validity, principals))
    agents = folder.sub("agents")
    for agent in plan.agents:
        own = agents.sub(agent.node)
        pem = issue(authority, Subject(agent.node, _names(agent.host), client=False), validity)
        _write_tls(own, "node", pem, authority)
        own.write("agent.token", f"{tokens[Principal(AGENT_PREFIX + agent.node, Role.AGENT)]}\n".encode())
        own.write("principals.toml", principals)
        own.write("agent.toml", agent_toml(agent, plan.urls, options))
    folder.write("ca.pem", authority.certificate, public=True)
    folder.write("client.toml", client_toml(plan.urls, f"tokens/{Role.ADMIN.value}.token"))


def _write_member(own: Folder, member: PlannedMember, plan: ClusterPlan, material: tuple[Pem, Validity, bytes]) -> None:
    authority, validity, principals = material
    spec = member.spec
    subject = Subject(spec.id, _names(member.host), member_uri(plan.cluster_id, spec.id))
    _write_tls(own, "member", issue(authority, subject, validity), authority)
    own.write("principals.toml", principals)
    own.write("server.toml", server_toml(member, plan))
    specs = tuple(other.spec for other in plan.members)
    write_marker(OsDisk(), own.path / "data", Marker(plan.cluster_id, configuration_of(specs)))


def _write_tls(own: Folder, name: str, pem: Pem, authority: Pem) -> None:
    own.write(f"{name}.pem", pem.certificate, public=True)
    own.write(f"{name}.key", pem.key)
    own.write("ca.pem", authority.certificate, public=True)


def _names(host: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((host, "localhost", LOCAL_HOST)))
