"""What would keep a deployment's services from starting, as the doctor's findings. A look starts and takes nothing."""

import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ddtree.deploy import applied
from ddtree.deploy.spec import Deployment
from ddtree.deploy.units import NGINX
from ddtree.doctor import Finding

SECONDS = 60.0  # for one program
NEWER_KEYS = re.compile(r"Unknown key (name )?'(RestartSteps|RestartMaxDelaySec)'")  # of systemd 254; skipped before


def finding(level: str, kind: str, about: str, what: str, seen: str, mend: str) -> Finding:
    """One of deploy's own."""
    return Finding(level, kind, about, what, seen, mend, "deploy")


def programs(d: Deployment, host: str) -> Iterator[Finding]:
    """The interpreter, the user, the secrets."""
    python = d.on(host)[0].argv[0]
    if not os.access(python, os.X_OK) or not Path(python).is_file():
        yield finding("fail", "python-missing", python, f"python {python} cannot be run", "no such program",
                      "name the interpreter that ddtree is installed in as python in the file")  # fmt: skip
    else:
        yield from _arguments(d, host)
    if d.user:
        try:
            pwd.getpwnam(d.user)
        except KeyError:
            yield finding("fail", "user-missing", d.user, f"there is no user {d.user}", "the system's list of users",
                          f"useradd --system --shell /usr/sbin/nologin {d.user}")  # fmt: skip
    if d.scope == "system" and d.cache and not os.path.isdir(d.cache):
        yield finding("fail", "cache-missing", d.cache, f"the folder {d.cache} of cache is not there, and systemd "
                      "starts no service that may write to it", "no such folder",
                      f"install --directory --owner {d.user} {d.cache}")  # fmt: skip
    if d.secrets:
        yield from _secrets(d.secrets)


def ports(d: Deployment, host: str) -> Iterator[Finding]:
    """Whether every port can be listened on. One that an applied service of this deployment has is left out."""
    own = {one.port for one in _own(d)}
    wanted = [(replica.port, d.host, replica.name) for replica in d.on(host)]
    if d.routed != "none":
        wanted.append((d.router.port, d.router.host, d.router_name))
    for port, address, name in wanted:
        error = None if port in own else refusal(address, port)
        if error:
            yield finding("fail", "port-taken", str(port), f"port {port} of {name} cannot be listened on",
                          f"bind {address}: {error}", f"ss -ltnp 'sport = :{port}' shows who has it; or choose "
                          "another port in the file")  # fmt: skip


def held(d: Deployment) -> list[int]:
    """Ports that were not tried, since a unit of this deployment that is installed has them."""
    wanted = {*range(d.port, d.port + d.per_host), *([d.router.port] if d.routed != "none" else [])}
    return sorted({one.port for one in _own(d) if one.port is not None} & wanted)


def refusal(address: str, port: int) -> str | None:
    """Why nothing can listen there; None where it can."""
    try:
        family, kind, number, _, where = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, number) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            sock.bind(where)
            sock.listen()
    except OSError as error:
        return error.strerror or str(error)
    return None


def duplicates(d: Deployment, host: str, others: Iterable[applied.Applied]) -> Iterator[Finding]:
    """Names, ports and GPUs that another deployment has, or that a unit of another program is called by."""
    replicas = d.on(host)
    names = [replica.name for replica in replicas] + ([d.router_name] if d.routed != "none" else [])
    for name in names:
        there = applied.read(applied.unit_folder(d.scope) / f"{name}.service")
        if there is not None and not there.deployment:
            yield finding("fail", "name-taken", name, f"a unit {name} is there, which ddtree deploy did not make",
                          f"{there.path}", "give the deployment another name in the file")  # fmt: skip
    ports = {replica.port: replica.name for replica in replicas}
    if d.routed != "none":
        ports[d.router.port] = d.router_name
    gpus = {gpu: replica.name for replica in replicas for gpu in replica.gpus}
    for one in others:
        if one.deployment == d.name:
            if one.source != d.source:
                yield finding("warn", "name-reused", d.name, f"a deployment {d.name} is applied already, from another "
                              f"file", f"{one.path}: Source={one.source}", "give one of them another name, or apply "
                              "this file in its place")  # fmt: skip
            continue
        if one.port in ports:
            yield finding("fail", "port-deployed", str(one.port), f"port {one.port} of {ports[one.port]} is "
                          f"{one.name}'s, of the deployment {one.deployment}", f"{one.path}",
                          "choose another port in the file")  # fmt: skip
        for gpu in set(one.gpus) & set(gpus):
            yield finding("warn", "gpu-shared", gpu, f"GPU {gpu} of {gpus[gpu]} is also {one.name}'s, of the "
                          f"deployment {one.deployment}: both must fit its memory", f"{one.path}",
                          "take it out of gpus in one of the files, if that was not meant")  # fmt: skip


def verified(d: Deployment, host: str, files: Mapping[str, str]) -> Iterator[Finding]:
    """What systemd-analyze says of the rendered units."""
    program = shutil.which("systemd-analyze")
    if program is None:
        yield finding("unknown", "units-unverified", "systemd", "the units were not verified: systemd-analyze is not "
                      "here", "PATH", "apt-get install systemd")  # fmt: skip
        return
    with tempfile.TemporaryDirectory() as folder:
        units = []
        for path, text in files.items():
            if path.startswith(f"{host}/systemd/"):
                units.append(Path(folder) / path.rpartition("/")[2])
                units[-1].write_text(text, encoding="utf-8")
        environment = {**os.environ, "XDG_RUNTIME_DIR": os.environ.get("XDG_RUNTIME_DIR") or folder}
        words = [program, "verify", "--man=no", *(["--user"] if d.scope == "user" else []), *map(str, units)]
        code, said = _run(words, environment)
        said = said.replace(f"{folder}/", "")
    lines = [line for line in said.splitlines() if line and not NEWER_KEYS.search(line)]
    if code is None:
        yield finding("unknown", "units-unverified", "systemd", "the units were not verified", said, program)
    elif code or lines:
        yield finding("fail" if code else "warn", "unit-refused", "units", "systemd finds fault with the units",
                      "; ".join(lines) or f"systemd-analyze verify ended with {code}",
                      "mend what is named there in the file")  # fmt: skip


def router(d: Deployment, host: str, files: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the router's program is here and takes its configuration."""
    if d.routed == "sglang-router":
        python = d.on(host)[0].argv[0]
        code, said = _run([python, "-c", "import sglang_router.launch_router"], os.environ)
        if code != 0:
            yield finding("fail", "router-missing", "sglang-router", "sglang-router cannot be imported",
                          _last(said), f"{python} -m pip install sglang-router")  # fmt: skip
    if d.routed != "nginx":
        return
    program = d.router.program or NGINX
    if not os.access(program, os.X_OK):
        yield finding("fail", "router-missing", program, f"there is no {program}", "no such program",
                      "apt-get install nginx-light, or name its path as router.program in the file")  # fmt: skip
        return
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "nginx.conf"
        config.write_text(files[f"{host}/nginx/{d.name}.conf"], encoding="utf-8")
        code, said = _run([program, "-t", "-q", "-e", "stderr", "-p", f"{folder}/", "-c", str(config)], os.environ)
    if code != 0:
        yield finding("unknown" if code is None else "fail", "router-refused", program, "nginx refuses its "
                      "configuration", _last(said), "mend what is named there in the file")  # fmt: skip


def _arguments(d: Deployment, host: str) -> Iterator[Finding]:
    """Names of options: `--help` ends the command once all were read. SGLang's own are not known here."""
    if d.engine == "sglang" or not d.args:
        return
    words = d.on(host)[0].argv
    verb = words.index("serve") + 1
    # Not as the last word, where an option without its value would take it, and the server would start.
    code, said = _run([*words[:verb], "--help", *words[verb:]], os.environ)
    if code is None:
        yield finding("unknown", "args-untold", "args", "whether ddtree serve takes args could not be told", said,
                      f"{d.on(host)[0].argv[0]} -m ddtree serve --help")  # fmt: skip
    elif code:
        yield finding("fail", "args-refused", "args", "ddtree serve refuses args", _last(said),
                      "ddtree serve --help lists the options")  # fmt: skip


def _secrets(path: str) -> Iterator[Finding]:
    there = Path(path).expanduser()
    try:
        mode = there.stat().st_mode & 0o777
    except PermissionError:
        yield finding("unknown", "secrets-unseen", path, f"secrets {path} may not be looked at", "permission denied",
                      "run the check as root")  # fmt: skip
    except OSError as error:
        yield finding("fail", "secrets-missing", path, f"secrets {path} is not there", error.strerror or str(error),
                      f"install -m 600 /dev/null {there}; then write NAME=VALUE lines into it")  # fmt: skip
    else:
        if mode & 0o077:
            yield finding("fail", "secrets-open", path, f"secrets {path} can be read by others", f"mode {mode:o}",
                          f"chmod 600 {there}")  # fmt: skip


def _own(d: Deployment) -> list[applied.Applied]:
    """This deployment's units that are installed, or kept in its folder by a manager other than systemd."""
    kept = [one for one in map(applied.read, d.state_folder.glob("run/*.service")) if one is not None]
    return [one for one in (*applied.applied(), *kept) if one.deployment == d.name]


def _run(words: list[str], environment: Mapping[str, str]) -> tuple[int | None, str]:
    """Exit code and all that was said; None where it could not be run or took too long."""
    try:
        ran = subprocess.run(
            words, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=SECONDS, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, f"{words[0]} did not end within {SECONDS:g} s"
    except OSError as error:
        return None, f"{words[0]}: {error.strerror}"
    return ran.returncode, ran.stdout.strip()


def _last(said: str) -> str:
    return said.splitlines()[-1] if said else "nothing was said"


def same_python(d: Deployment, host: str) -> bool:
    """Whether the services run with the interpreter that runs this."""
    python = Path(d.on(host)[0].argv[0])
    return python.parent == Path(sys.executable).parent
