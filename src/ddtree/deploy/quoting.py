"""Text as systemd reads it back: values of environment files, words of commands (systemd.exec, .service)."""

import re

PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
# Inside double quotes of an environment file a backslash takes its meaning from these alone (as in a shell).
ESCAPED = re.compile(r'["\\`$]')


def environment_line(name: str, value: str) -> str:
    """NAME="value" for an EnvironmentFile=: nothing in it is expanded, and newlines stay."""
    return f'{name}="{ESCAPED.sub(lambda found: chr(92) + found[0], value)}"'


def word(text: str) -> str:
    """One word of ExecStart=: no specifier (%), no variable ($), no separator (;) is seen in it."""
    text = specifiers(text).replace("$", "$$")
    if PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def command(words: list[str] | tuple[str, ...]) -> str:
    """A whole command line. The first word is the program's path, where $ is no variable: it must hold none."""
    return " ".join(map(word, words))


def specifiers(text: str) -> str:
    """For keys that know specifiers and nothing else."""
    return text.replace("%", "%%")


def path(text: str) -> str:
    """A path that begins with / or ~/; the home folder is the specifier %h."""
    return f"%h{specifiers(text[1:])}" if text.startswith("~/") else specifiers(text)
