"""All looks at one host together: deploy's own findings, and the doctor's for what the services load."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ddtree.deploy import findings as look
from ddtree.deploy.applied import applied
from ddtree.deploy.command import named
from ddtree.deploy.render import render
from ddtree.deploy.spec import Deployment
from ddtree.doctor import Asked, Diagnosis, Facts, Finding, judge
from ddtree.doctor import load as load_rules
from ddtree.doctor.facts import Gpu
from ddtree.doctor.fit import needs
from ddtree.doctor.judge import ORDER, VERDICTS
from ddtree.doctor.probe import probe
from ddtree.doctor.text import Style, paragraphs, table, tables
from ddtree.plan import NAMES

CROWDED = ("contexts-crowded",)

LEADS = {
    "fine": "nothing was found that would keep the services from starting",
    "would fail": "not all services would start, or work",
    "could not tell": "something that matters could not be seen",
}


@dataclass(frozen=True)
class Report:
    """What was found on one host."""

    title: str
    findings: tuple[Finding, ...]  # worst first
    unseen: tuple[tuple[str, str], ...]  # what was not looked at, and why
    facts: Facts | None = None  # None: the doctor was left out
    diagnosis: Diagnosis | None = None

    @property
    def verdict(self) -> str:
        """fine, would fail or could not tell."""
        levels = {one.level for one in self.findings}
        return "would fail" if "fail" in levels else "could not tell" if "unknown" in levels else "fine"

    @property
    def exit_code(self) -> int:
        """0 fine, 1 would fail, 2 could not tell."""
        return VERDICTS[self.verdict]

    def as_text(self, style: Style = lambda text, level: text, width: int = 0) -> str:
        """As `ddtree doctor` shows it. width: of the terminal; 0: no line is broken."""
        level = {0: "fine", 1: "fail", 2: "unknown"}[self.exit_code]
        parts = [[f"{style(self.verdict, level)}: {self.title}: {LEADS[self.verdict]}"]]
        parts += paragraphs(self.findings, style, width)
        if self.facts is not None and self.diagnosis is not None:
            parts += tables(self.facts, self.diagnosis, width)
        if self.unseen:
            parts.append(table("not looked at", self.unseen, width))
        return "\n\n".join("\n".join(part) for part in parts)


def check(d: Deployment, host: str, *, doctor: bool = True) -> Report:
    """Look at this machine, which is `host` of the deployment. Raises InvalidOption where it has no such host."""
    files = render(d)
    found = [
        *look.programs(d, host), *look.verified(d, host, files), *look.router(d, host, files), *look.ports(d, host),
        *look.duplicates(d, host, applied()),
    ]  # fmt: skip
    unseen = list(_unseen(d, host))
    facts = diagnosis = None
    if not doctor:
        unseen.append(("engine, model, drafter, cards", "--no-doctor"))
    elif not look.same_python(d, host):
        python = d.on(host)[0].argv[0]
        found.append(look.finding("unknown", "other-python", python, "the doctor looks at the Python that it runs in, "
                                  "and the services have another one", f"python is {python}",
                                  f"{python} -m ddtree deploy check {d.source}"))  # fmt: skip
    else:
        facts, diagnosis = _doctor(d, host)
        found += [*diagnosis.findings, *_cards(d, facts), *_memory(d, facts), *_handed_out(d, facts)]
        unseen += diagnosis.unseen
    found.sort(key=lambda one: ORDER.index(one.level))
    title = f"deployment {d.name} on {host}, {d.per_host} of {d.model} with {d.engine}, {d.mode}"
    return Report(title, tuple(found), tuple(unseen), facts, diagnosis)


def _unseen(d: Deployment, host: str) -> Iterator[tuple[str, str]]:
    others = [name for name in d.hosts if name != host]
    if others:
        yield f"hosts {', '.join(others)}", "run the check there too"
    ports = look.held(d)
    if ports:
        yield f"ports {', '.join(map(str, ports))}", "services of this deployment that are applied have them"
    if d.engine == "sglang" and d.args:
        yield "args", "they are SGLang's own, which reads them at its start"


def _doctor(d: Deployment, host: str) -> tuple[Facts, Diagnosis]:
    """One probe with the environment of the services; each group of cards is judged as its replica sees it."""
    asked = Asked(
        d.engine, d.model, d.drafter, 0, named(d.args, ("--attention-backend",)), named(d.args, ("--grammar-backend",)),
        d.mode, **_load(d),
    )  # fmt: skip
    rules = load_rules()
    replicas = d.on(host)
    shared = {**replicas[0].environment, "CUDA_VISIBLE_DEVICES": ",".join(d.gpus)}
    if d.home and not d.cache:
        shared.pop("HOME", None)  # systemd makes that folder, at the first start
    with _environment(shared):
        facts = probe(asked, rules.sonames(d.engine))
    findings: dict[tuple[str, str, str], Finding] = {}
    theirs = CROWDED if look.held(d) else ()  # services that are applied hold memory themselves
    diagnosis = judge(facts, rules)
    for gpus in {replica.gpus: None for replica in replicas}:
        seen = {**facts.system.environment, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        one = judge(replace(facts, system=replace(facts.system, environment=seen)), rules)
        findings |= {(f.id, f.about, f.what): f for f in one.findings if f.id not in theirs}
    return facts, replace(diagnosis, findings=tuple(findings.values()))


def _load(d: Deployment) -> dict[str, int]:
    """The sizes that replicas of the embedded engine are told, for the memory of their contexts."""
    if d.engine != "embedded":
        return {}
    told = {name: named(d.args, (f"--{name.replace('_', '-')}",)) or "" for name in NAMES.values()}
    return {name: int(value) for name, value in told.items() if value.isdecimal() and int(value)}


def _cards(d: Deployment, facts: Facts) -> Iterator[Finding]:
    """GPUs of the file that this machine does not have. Where nvidia-smi failed, the doctor has said so."""
    if not d.gpus or facts.driver.smi in ("failed", "timeout"):
        return
    for gpu in d.gpus:
        if gpu.startswith("MIG-"):
            yield look.finding("unknown", "gpu-part", gpu, f"whether {gpu} is here could not be told", "parts of GPUs "
                               "are not looked at", "nvidia-smi -L lists them")  # fmt: skip
        elif not any(_is(card, gpu) for card in facts.gpus):
            listed = ", ".join(str(one.index) for one in facts.gpus) or "no GPU"
            yield look.finding("fail", "gpu-missing", gpu, f"GPU {gpu} is not in this machine", f"nvidia-smi: {listed}",
                               'take it out of gpus in the file; gpus = "none" runs on the CPU')  # fmt: skip


def _is(card: Gpu, name: str) -> bool:
    """Whether the file means this card; CUDA takes the beginning of a UUID, too."""
    return str(card.index) == name or (not name.isdigit() and (card.uuid or "").startswith(name))


def _memory(d: Deployment, facts: Facts) -> Iterator[Finding]:
    """What replicas that share a card or a machine take at the least; the doctor looks at one.

    On a card contexts count too; on a CPU they take their pages as they are written.
    """
    need = needs(facts)
    each, parts = need["weights_mib"], "weights in 16 bits"
    if d.gpus and need["least_mib"] is not None:
        each, parts = need["least_mib"], need["sum"]
    together = d.replicas_per_gpu if d.gpus else d.per_host
    if each is None or together < 2 or look.held(d):  # what runs already has its memory
        return
    rooms = {card.index: card.memory_mib for card in facts.gpus if any(_is(card, name) for name in d.gpus)}
    for index, room in rooms.items() if d.gpus else [(None, facts.system.memory_mib)]:
        if room is not None and each * together > room:
            where = "this machine" if index is None else f"GPU {index}"
            yield look.finding("fail", "replicas-too-large", where, f"{together} replicas do not fit {where} together",
                               f"at least {each / 1024:.1f} GiB each ({parts}), {room / 1024:.1f} GiB in all",
                               "fewer replicas in the file")  # fmt: skip


def _handed_out(d: Deployment, facts: Facts) -> Iterator[Finding]:
    """Ports that the system gives to other programs' connections."""
    span = facts.system.ephemeral
    wanted = [*range(d.port, d.port + d.per_host), *([d.router.port] if d.routed != "none" else [])]
    for port in wanted:
        if len(span) == 2 and span[0] <= port <= span[1]:
            yield look.finding("warn", "port-ephemeral", str(port), f"port {port} is among those that the system hands "
                               "out: another program may have it at the next start",
                               f"net.ipv4.ip_local_port_range is {span[0]}, {span[1]}",
                               "choose ports below that range in the file")  # fmt: skip


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """This process's environment as a service has it, for the doctor and its children."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
