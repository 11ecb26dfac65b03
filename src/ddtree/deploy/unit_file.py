"""A rendered systemd unit read back: what runs, in what environment, how it is stopped and started again.

The manager without systemd runs the very same ExecStart by this, and both find here which files a service reads.
"""

import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ddtree.deploy.failures import DeployFailed

CACHES = "/var/cache"  # where CacheDirectory= of the system's systemd lies; units of a user's have none
SPANS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "hr": 3600.0, "d": 86400.0}
PREFIXES = "@-:+!"  # before a command of ExecStart=; of these only "-" means something here
# Of an environment file: what stands before a value, a value's quoted parts, and what follows them.
KEY = re.compile(r"[ \t\r\n]*(?:[#;][^\r\n]*|([^ \t\r\n][^=\r\n]*)(=?))?")
QUOTED = re.compile(r"[ \t]*(?:\"((?:[^\"\\]|\\.)*)\"?|'([^']*)'?)", re.S)
BARE = re.compile(r"[ \t]*((?:[^\\\r\n]|\\.)*?)[ \t]*(?:[\r\n]|\\?\Z)", re.S)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Unit:
    """One service. Times in seconds."""

    name: str  # without .service
    argv: tuple[str, ...]
    before: tuple[tuple[str, ...], ...] = ()  # ExecStartPre=, in order
    reload: tuple[str, ...] = ()  # ExecReload=; $MAINPID stands for the main process
    environment: dict[str, str] = field(default_factory=dict, repr=False)  # of Environment=; may hold secrets
    environment_files: tuple[tuple[str, bool], ...] = ()  # path, and whether it may be missing
    folder: str | None = None
    restart: str = "no"  # no, always, on-failure
    restart_s: float = 0.1
    restart_most_s: float = 60.0
    burst: int = 5
    interval_s: float = 10.0
    stop_s: float = 90.0
    stop_signal: str = "SIGTERM"
    never_again: tuple[int, ...] = ()  # exit codes of RestartPreventExitStatus=
    user: str | None = None
    folders: tuple[str, ...] = ()  # of RuntimeDirectory= and CacheDirectory=, whole paths
    text: str = field(default="", repr=False)

    def settled_environment(self) -> dict[str, str]:
        """The service's own variables, those of its files included; a file wins, as for systemd."""
        settled = dict(self.environment)
        for path, optional in self.environment_files:
            try:
                text = Path(path).read_text(encoding="utf-8")
            except FileNotFoundError:
                if optional:
                    continue
                raise DeployFailed(f"{self.name} reads {path}, which is not there: render it again") from None
            except (OSError, UnicodeDecodeError) as error:
                raise DeployFailed(f"{self.name} reads {path}, which cannot be read: {error}") from error
            settled |= read_environment(text)
        return settled

    def option(self, name: str) -> str | None:
        """The value of `--name` in the command, written as two words or with =; None where it is not given."""
        for place, word in enumerate(self.argv):
            if word == name and place + 1 < len(self.argv):
                return self.argv[place + 1]
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
        return None


def parse(name: str, text: str, runtime: str | None = None) -> Unit:
    """A unit file's text; `runtime` is what %t stands for. Raises DeployFailed where there is no ExecStart= to run."""
    entries = _entries(text)
    runtime = runtime or os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    meant = {"%": "%", "h": str(Path.home()), "t": runtime}

    def plain(value: str) -> str:
        return re.sub(r"%(.)", lambda found: _specifier(name, found[1], meant), value)

    def last(key: str, default: str) -> str:
        return plain((entries.get(key) or [default])[-1])

    def commands(key: str) -> list[tuple[str, ...]]:
        return [words(line, plain) for line in entries.get(key, [])]

    starts, reloads = commands("ExecStart"), commands("ExecReload")
    if len(starts) != 1:
        raise DeployFailed(f"unit {name} has {len(starts)} lines ExecStart=: give exactly one")
    environment: dict[str, str] = {}
    for line in entries.get("Environment", []):
        environment |= dict(plain(pair).partition("=")[::2] for pair in shlex.split(line))
    files = [plain(path) for path in entries.get("EnvironmentFile", [])]
    return Unit(
        name,
        starts[0],
        before=tuple(commands("ExecStartPre")),
        reload=reloads[0] if reloads else (),
        environment=environment,
        environment_files=tuple((path.lstrip("-"), path.startswith("-")) for path in files),
        folder=last("WorkingDirectory", "") or None,
        restart=last("Restart", "no"),
        restart_s=seconds(last("RestartSec", "100ms")),
        restart_most_s=seconds(last("RestartMaxDelaySec", "60")),
        burst=int(last("StartLimitBurst", "5")),
        interval_s=seconds(last("StartLimitIntervalSec", "10")),
        stop_s=seconds(last("TimeoutStopSec", last("TimeoutSec", "90"))),
        stop_signal=last("KillSignal", "SIGTERM"),
        never_again=tuple(int(word) for word in last("RestartPreventExitStatus", "").split() if word.isdigit()),
        user=last("User", "") or None,
        folders=tuple(
            f"{root}/{word}"
            for root, key in ((runtime, "RuntimeDirectory"), (CACHES, "CacheDirectory"))
            for word in last(key, "").split()
        ),
        text=text,
    )


def words(line: str, plain: Callable[[str], str] = str) -> tuple[str, ...]:
    """The words of a command in systemd's quoting: shell quotes; `plain` puts in specifiers; $$ is the sign itself."""
    try:
        found = shlex.split(line.lstrip(PREFIXES))
    except ValueError as error:
        raise DeployFailed(f"the command {line!r} cannot be read: {error}") from error
    return tuple(plain(word).replace("$$", "$") for word in found)


def seconds(text: str) -> float:
    """A time as systemd writes it: 90, 5s, 1min 30s, infinity."""
    if text.strip() == "infinity":
        return float("inf")
    parts = re.findall(r"([\d.]+)\s*([a-z]*)", text)
    if not parts or any(unit and unit not in SPANS for _, unit in parts):
        raise DeployFailed(f"the time {text!r} cannot be read: write seconds, or 90s, 1min 30s")
    return sum(float(number) * SPANS[unit or "s"] for number, unit in parts)


def read_environment(text: str) -> dict[str, str]:
    """The variables of an environment file, as systemd reads it (systemd.exec, EnvironmentFile=).

    Quoted parts of a value may hold newlines, and what follows them belongs to it; outside of quotes a backslash is
    taken away and keeps what comes next. A line without =, or with a name that is none, says nothing.
    """
    found: dict[str, str] = {}
    at = 0
    while at < len(text) and (line := KEY.match(text, at)) is not None:
        at = line.end()
        if line[2]:
            value, at = _value(text, at)
            if NAME.fullmatch(name := line[1].rstrip()):
                found[name] = value
    return found


def _value(text: str, at: int) -> tuple[str, int]:
    """The value that begins there, and where it ends."""
    parts = []
    while (quoted := QUOTED.match(text, at)) is not None:
        parts.append(_unescaped(quoted[1], r'["\\$`\n]') if quoted[1] is not None else quoted[2])
        at = quoted.end()
    bare = BARE.match(text, at)
    assert bare is not None  # it takes whatever there is
    return "".join([*parts, _unescaped(bare[1], ".")]), bare.end()


def _unescaped(text: str, signs: str) -> str:
    """Without the backslashes before these signs; with a newline behind it, both are taken away."""
    return re.sub(rf"\\({signs})", lambda found: found[1].strip("\n"), text, flags=re.S)


def _specifier(unit: str, letter: str, meant: dict[str, str]) -> str:
    if letter not in meant:
        raise DeployFailed(f"unit {unit} uses %{letter}, which only systemd knows: choose --manager systemd")
    return meant[letter]


def _entries(text: str) -> dict[str, list[str]]:
    """Every key's values in order; an empty value takes back those before it. Long lines may end in a backslash."""
    entries: dict[str, list[str]] = {}
    for line in map(str.strip, re.sub(r"\\\n[ \t]*", " ", text).splitlines()):
        if not line or line[0] in "#;[" or "=" not in line:
            continue
        key, _, value = line.partition("=")
        entries[key.strip()] = [*entries.get(key.strip(), []), value.strip()] if value.strip() else []
    return entries
