"""Units of systemd: of a replica, and of the router. Why each line is there or left out: docs/deploy.md."""

from collections.abc import Iterator, Sequence

from ddtree.deploy.quoting import command, path, specifiers, word
from ddtree.deploy.spec import Deployment, Replica

NGINX = "/usr/sbin/nginx"
SECTION = "X-DDTree"  # systemd skips sections that begin with X-
STEPS_SINCE = 254  # the version that knows RestartSteps=
LAST_WORDS_SECONDS = 15  # beyond stop_seconds: for cut answers to be told so, and for the program's own end
HEALTH_SECONDS = 10  # by which systemd waits longer than the program that asks /health
# Five failures in a row, also of a model that loads for some minutes, and it stays down.
LIMIT = ("StartLimitIntervalSec=30min", "StartLimitBurst=5")
# What the kernel checks for a service that may do less, also where a user's own systemd starts it.
EVERYBODYS = (
    "NoNewPrivileges=yes", "RestrictSUIDSGID=yes", "RestrictRealtime=yes", "RestrictNamespaces=yes",
    "LockPersonality=yes", "SystemCallArchitectures=native",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK", "UMask=0027",
)  # fmt: skip
# What only the system's systemd can do: mounts and capabilities.
SYSTEMS = (
    "ProtectSystem=strict", "ProtectHome=read-only", "PrivateTmp=yes", "ProtectKernelTunables=yes",
    "ProtectKernelModules=yes", "ProtectKernelLogs=yes", "ProtectControlGroups=yes", "ProtectHostname=yes",
)  # fmt: skip


def replica_unit(d: Deployment, replica: Replica) -> str:
    """The unit of one replica. Its start lasts until /health answers."""
    gpus = f"GPU {','.join(replica.gpus)}" if replica.gpus else "no GPU"
    told = {"Deployment": d.name, "Source": d.source, "Port": str(replica.port), "Gpus": " ".join(replica.gpus)}
    health = [replica.argv[0], "-m", "ddtree.deploy.health", health_url(d.host, replica.port), str(d.start_seconds)]
    service = [
        "Type=exec",
        f"ExecStart={command(replica.argv)}",
        f"ExecStartPost={command(health)}",
        f"EnvironmentFile={path(f'{d.place}/env/{replica.name}.env')}",
        *([f"EnvironmentFile={path(d.secrets)}"] if d.secrets else []),
        *_restart(d),
        f"TimeoutStartSec={d.start_seconds + HEALTH_SECONDS}",
        "KillMode=mixed",  # the first signal to the main process alone, which ends its children itself
        "KillSignal=SIGTERM",
        f"TimeoutStopSec={d.stop_seconds + LAST_WORDS_SECONDS}",
        "OOMPolicy=stop",
        "LimitNOFILE=65536",
        "LimitMEMLOCK=infinity",
        *_identity(d),
        *_hardening(d, ()),
        *_cache(d),
    ]
    return _unit(d, f"{replica.name}: {d.model}, {d.mode}, {gpus}, port {replica.port}", service, told)


def router_unit(d: Deployment, host: str) -> str:
    """The unit of a host's router."""
    told = {"Deployment": d.name, "Source": d.source, "Port": str(d.router.port), "Gpus": ""}
    sglang = d.routed == "sglang-router"
    service = ["Type=exec", *(_sglang_router(d, host) if sglang else _nginx(d))]
    service += [*_restart(d), "KillMode=mixed", f"TimeoutStopSec={d.stop_seconds + LAST_WORDS_SECONDS}"]
    service += ["LimitNOFILE=65536", *_identity(d)]
    low = ("CAP_NET_BIND_SERVICE",) if d.router.port < 1024 else ()
    service += [*_hardening(d, low), *(["PrivateDevices=yes"] if d.scope == "system" else [])]
    return _unit(d, f"{d.router_name}: {d.routed} on port {d.router.port}", service, told)


def upstreams(d: Deployment, host: str) -> list[tuple[Replica, str]]:
    """What the router of `host` sends requests to: replicas, and the host part of their addresses."""
    reached = d.hosts if d.router.reach == "all" else (host,)
    return [(replica, _address(d, host, replica)) for name in reached for replica in d.on(name)]


def health_url(host: str, port: int) -> str:
    """Where a server that listens on `host` is asked on its own machine."""
    return f"http://{reached(host)}:{port}/health"


def reached(host: str) -> str:
    """The address by which the machine itself reaches what listens on `host`; IPv6 in brackets."""
    return bracketed({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host))


def bracketed(host: str) -> str:
    """An IPv6 address as it is written before a port."""
    return f"[{host}]" if ":" in host else host


def _address(d: Deployment, host: str, replica: Replica) -> str:
    return reached(d.host) if replica.host == host else replica.host


def _nginx(d: Deployment) -> Iterator[str]:
    program = d.router.program or NGINX
    run = f"{word(program)} -e stderr -p %t/{d.router_name}/ -c {_quoted(path(f'{d.place}/nginx/{d.name}.conf'))}"
    yield f"ExecStart={run}"
    yield f"ExecReload={run} -s reload"
    yield f"RuntimeDirectory={d.router_name}"
    yield "KillSignal=SIGQUIT"  # answers that run are ended first


def _sglang_router(d: Deployment, host: str) -> Iterator[str]:
    urls = [f"http://{address}:{replica.port}" for replica, address in upstreams(d, host)]
    words = [d.on(host)[0].argv[0], "-m", "sglang_router.launch_router", "--worker-urls", *urls]
    words += ["--host", d.router.host, "--port", str(d.router.port), "--prometheus-host", "127.0.0.1"]
    words += ["--worker-startup-timeout-secs", str(d.start_seconds), "--health-check-interval-secs", "5"]
    words += ["--shutdown-grace-period-secs", str(d.stop_seconds), *d.router.args]
    yield f"ExecStart={command(words)}"
    yield "KillSignal=SIGTERM"


def _restart(d: Deployment) -> Iterator[str]:
    yield "Restart=on-failure"
    yield "RestartPreventExitStatus=2"  # a wrong option: no new start mends that
    if d.systemd >= STEPS_SINCE:
        yield from ("RestartSec=5", "RestartSteps=5", "RestartMaxDelaySec=120")
    else:
        yield "RestartSec=20"


def _identity(d: Deployment) -> list[str]:
    return [f"User={d.user}"] if d.user else []


def _hardening(d: Deployment, capabilities: Sequence[str]) -> Iterator[str]:
    yield from EVERYBODYS
    if d.scope == "system":
        yield from SYSTEMS
        yield f"CapabilityBoundingSet={' '.join(capabilities)}"
        if capabilities:
            yield f"AmbientCapabilities={' '.join(capabilities)}"


def _cache(d: Deployment) -> list[str]:
    if d.scope != "system":
        return []
    return [f"ReadWritePaths={_quoted(path(d.cache))}"] if d.cache else [f"CacheDirectory=ddtree/{d.name}"]


def _quoted(text: str) -> str:
    """A path that holds specifiers on purpose, where a list of words is read."""
    return f'"{text}"' if " " in text else text


def _unit(d: Deployment, what: str, service: Sequence[str], told: dict[str, str]) -> str:
    network = ["Wants=network-online.target", "After=network-online.target"] if d.scope == "system" else []
    target = "multi-user.target" if d.scope == "system" else "default.target"
    parts = {
        "Unit": [f"Description={specifiers(what)}", *network, *LIMIT],
        "Service": service,
        "Install": [f"WantedBy={target}"],
        SECTION: [f"{name}={value}" for name, value in told.items()],
    }
    return "\n".join("\n".join([f"[{name}]", *lines, ""]) for name, lines in parts.items())
