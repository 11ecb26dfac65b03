"""A deployment as one TOML file: every field checked, collisions refused by name. Writes and starts nothing."""

import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddtree.config import EMBEDDED, MODES
from ddtree.deploy import limits, together
from ddtree.deploy.command import argv
from ddtree.errors import InvalidOption
from ddtree.settings import at_least, build, one_of, read_toml, within

ENGINES = ("embedded", "sglang")
SCOPES = ("system", "user")
ROUTERS = ("auto", "nginx", "sglang-router", "none")
REACHES = ("host", "all")
HERE = "localhost"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # systemd's own


@dataclass(frozen=True)
class RouterPart:
    """[router]: the one address in front of the replicas of a host, or of all hosts."""

    kind: str = "auto"  # nginx, sglang-router, none; auto: sglang-router for the engine sglang, else nginx
    host: str = "127.0.0.1"  # address to listen on
    port: int = 30000
    reach: str = "host"  # host: the replicas of its own host; all: those of every host
    program: str = ""  # nginx's path; "": /usr/sbin/nginx. sglang-router runs with `python`
    args: tuple[str, ...] = ()  # more flags for sglang-router, as they are
    max_body_mib: int = 16  # largest body that nginx takes; a server's own limit is --max-body-mib

    def __post_init__(self) -> None:
        one_of("router.kind", self.kind, ROUTERS)
        one_of("router.reach", self.reach, REACHES)
        limits.address("router.host", self.host)
        within("router.port", self.port, 1, 65535)
        within("router.max_body_mib", self.max_body_mib, 1, 1 << 20)
        limits.words("router.args", self.args)
        if self.program:
            limits.absolute("router.program", self.program)


@dataclass(frozen=True)
class Replica:
    """One service of one host."""

    index: int  # on its host, from 0
    host: str  # of `hosts`
    gpus: tuple[str, ...]  # indices or UUIDs that it sees; empty: none
    port: int
    name: str  # of its unit, without ".service"
    argv: tuple[str, ...]  # the whole command, the program's path first
    environment: Mapping[str, str]  # what its environment file holds


@dataclass(frozen=True)
class Deployment:
    """The whole file. Raises InvalidOption for a value that cannot be used, naming the field and the remedy."""

    name: str = "ddtree"  # units are called NAME-0, NAME-1, ... and NAME-router
    hosts: tuple[str, ...] = (HERE,)  # names or IPv4 addresses; every host gets the same replicas
    scope: str = "user"  # whose systemd runs them: system, or the user's own
    user: str = ""  # scope system only, and needed there: whom they run as
    engine: str = "embedded"
    model: str = EMBEDDED
    drafter: str = "auto"
    mode: str = "tree"
    gpus: tuple[str, ...] = ()  # of each host, as indices or UUIDs; in the file "none" stands for no GPU
    replicas_per_gpu: int = 1  # that share a GPU
    gpus_per_replica: int = 1  # engine sglang only: tensor parallelism
    cpu_replicas: int = 1  # on each host, where gpus is "none"
    host: str = "127.0.0.1"  # address that replicas listen on
    port: int = 30001  # of a host's first replica; the next take the next
    args: tuple[str, ...] = ()  # more flags of `ddtree serve`, as they are
    environment: dict[str, str] = field(default_factory=dict)  # of every replica, in files that only its user reads
    secrets: str = ""  # one more environment file, written by hand on each host, for keys and tokens
    python: str = ""  # the interpreter that ddtree is installed in; "": the one that runs this command
    folder: str = ""  # of each host, for rendered files and state; "": /var/lib/ddtree/NAME, ~/.local/share/ddtree/NAME
    cache: str = ""  # home folder for downloads and compiled kernels; "": /var/cache/ddtree/NAME, or the user's own
    start_seconds: int = 1800  # from a start until /health answers
    stop_seconds: int = 30  # that running answers may take to end after a stop
    systemd: int = 0  # the oldest version among the hosts; 0: this machine's
    router: RouterPart = field(default_factory=RouterPart)
    source: str = field(default="", metadata={"in_file": False})  # the file's name

    def __post_init__(self) -> None:
        limits.name("name", self.name)
        limits.hosts(self.hosts)
        one_of("scope", self.scope, SCOPES)
        one_of("engine", self.engine, ENGINES)
        one_of("mode", self.mode, MODES)
        for option in ("model", "drafter"):
            limits.model(option, getattr(self, option))
        limits.address("host", self.host)
        for option in ("replicas_per_gpu", "gpus_per_replica", "cpu_replicas", "start_seconds"):
            at_least(option, getattr(self, option), 1)
        within("stop_seconds", self.stop_seconds, 0, 86400)
        if self.systemd:
            within("systemd", self.systemd, limits.OLDEST_SYSTEMD, 9999)
        limits.gpus(self.gpus)
        limits.environment(self.environment)
        limits.args(self.args, self.engine)
        for option in ("python", "secrets", "folder", "cache"):
            if value := getattr(self, option):
                limits.absolute(option, value)
        together.check(self)

    @property
    def routed(self) -> str:
        """The router's kind, never auto."""
        if self.router.kind == "auto":
            return "sglang-router" if self.engine == "sglang" else "nginx"
        return self.router.kind

    @property
    def per_host(self) -> int:
        """Replicas of one host."""
        return len(self.gpus) * self.replicas_per_gpu // self.gpus_per_replica if self.gpus else self.cpu_replicas

    @property
    def router_name(self) -> str:
        """Of the router's unit, without ".service"."""
        return f"{self.name}-router"

    @property
    def place(self) -> str:
        """`folder`, or its default; begins with / or ~/."""
        default = "/var/lib/ddtree" if self.scope == "system" else "~/.local/share/ddtree"
        return self.folder or f"{default}/{self.name}"

    @property
    def state_folder(self) -> Path:
        """`place` on this machine."""
        return Path(self.place).expanduser()

    def replicas(self) -> tuple[Replica, ...]:
        """Those of every host, in the order of `hosts`."""
        return tuple(replica for host in self.hosts for replica in self.on(host))

    def on(self, host: str) -> tuple[Replica, ...]:
        """The replicas of one host. Raises InvalidOption for a host that is not in `hosts`."""
        one_of("host", host, self.hosts)
        return tuple(self._replicas(host))

    def here(self, host: str | None = None) -> str:
        """Which of `hosts` this machine is: `host` where it is given, else by its name. Raises InvalidOption."""
        if host is not None:
            one_of("host", host, self.hosts)
            return host
        full = socket.gethostname()
        for name in (HERE, full, full.partition(".")[0], *together.LOCAL):
            if name in self.hosts:
                return name
        raise InvalidOption(
            f"this machine is called {full}, which is none of {', '.join(self.hosts)}: say which one it is with --host"
        )

    def _replicas(self, host: str) -> Iterator[Replica]:
        for index in range(self.per_host):
            first = index * self.gpus_per_replica // self.replicas_per_gpu
            gpus = self.gpus[first : first + self.gpus_per_replica]
            port = self.port + index
            yield Replica(
                index, host, gpus, port, f"{self.name}-{index}", tuple(argv(self, port)), self._environment(gpus)
            )

    def _environment(self, gpus: tuple[str, ...]) -> dict[str, str]:
        programs = str(Path(self.python or sys.executable).parent)  # ninja and the like, for kernels made at a start
        found = {"PATH": f"{programs}:{PATH}"}
        found["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)  # empty: no GPU is seen, also where there are some
        if gpus:
            found["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # indices as nvidia-smi counts; CUDA's own order is by speed
        if self.home:
            found["HOME"] = self.home  # where ddtree, the hub and compilers keep what they fetch and make
        return {**found, **self.environment}

    @property
    def home(self) -> str:
        """The home folder that services get; "": their user's own."""
        return self.cache or (f"/var/cache/ddtree/{self.name}" if self.scope == "system" else "")


def load(path: Path, sets: Sequence[str] = ()) -> Deployment:
    """The deployment of a file, `sets` ("mode=linear", values as TOML has them; bare words are text) over it.

    Raises ModelNotFound, DamagedFile or InvalidOption, naming the file or the field and the remedy.
    """
    if not path.name.isprintable() or path.name.endswith("\\"):  # it stands in the first line of each rendered file
        raise InvalidOption(f"{str(path)!r} cannot be used: give the file a name of printable signs, no \\ at its end")
    raw = read_toml(path, sets, "docs/deploy.md", "mode=linear")
    if "gpus" in raw:
        raw["gpus"] = limits.gpus_of_file(raw["gpus"])
    found: Deployment = build(Deployment(source=path.name), raw)
    return found if found.systemd else replace(found, systemd=limits.systemd_here())
