"""How systemd 252 reads environment files and commands: its rules once more, and its own code where it is installed.

The rules: man systemd.exec (EnvironmentFile=), man systemd.service (COMMAND LINES).
"""

import ctypes
import re
from pathlib import Path

UNQUOTE_AND_UNESCAPE = 2 | 32  # the flags that ExecStart= is read with
LIBRARIES = [
    Path(folder) / "libsystemd-shared-252.so"
    for folder in (
        "/usr/lib/x86_64-linux-gnu/systemd",
        "/usr/lib/aarch64-linux-gnu/systemd",
        "/lib/systemd",
        "/usr/lib/systemd",
    )
]
LIBRARY = next((path for path in LIBRARIES if path.exists()), None)


def read_environment(text: str) -> dict[str, str]:
    """NAME=VALUE lines, values in double quotes throughout: what the files are written as."""
    found, place = {}, 0
    while place < len(text):
        if text[place] in "\n#;":
            place = text.find("\n", place) + 1 or len(text)
            continue
        name, equals, _ = text[place:].partition("=")
        assert equals, text[place:]
        assert text[place + len(name) + 1] == '"', text[place:]
        place += len(name) + 2
        value = ""
        while text[place] != '"':
            if text[place] == "\\" and text[place + 1] in '"\\`$':
                place += 1
            value += text[place]
            place += 1
        assert text[place + 1] == "\n", "nothing comes behind the closing quote"
        place += 2
        found[name] = value
    return found


def read_command(line: str) -> list[str]:
    """Words in double quotes or bare, %% and $$ for the signs themselves; anything else with a meaning is refused."""
    words, place = [], 0
    for found in re.finditer(r'"((?:[^"\\]|\\["\\])*)"(?= |$)|([^\s"\'\\;]+)(?= |$)', line):
        assert found.start() == place, line[place:]
        place = found.end() + 1
        word = re.sub(r"\\(.)", r"\1", found[1]) if found[2] is None else found[2]
        assert not re.search(r"(?<!%)(%%)*%(?!%)|(?<!\$)(\$\$)*\$(?!\$)", word), word
        words.append(word.replace("%%", "%").replace("$$", "$"))
    assert place == len(line) + 1, line
    return words


def its_own_environment(path: Path) -> dict[str, str]:
    """By systemd's own code. Variables that a service would not get are left out, as it does."""
    shared, libc = ctypes.CDLL(str(LIBRARY)), ctypes.CDLL(None)
    found = ctypes.POINTER(ctypes.c_char_p)()
    assert shared.load_env_file(None, str(path).encode(), ctypes.byref(found)) >= 0
    shared.strv_env_clean_with_callback.restype = ctypes.POINTER(ctypes.c_char_p)
    cleaned = shared.strv_env_clean_with_callback(found, None, None)
    return dict(entry.partition("=")[::2] for entry in _strings(cleaned, libc))


def its_own_command(line: str) -> list[str]:
    """By systemd's own code, but for specifiers, which must all be %%."""
    shared, libc = ctypes.CDLL(str(LIBRARY)), ctypes.CDLL(None)
    buffer = ctypes.create_string_buffer(line.encode())
    rest = ctypes.cast(buffer, ctypes.c_char_p)
    start, words = ctypes.addressof(buffer), []
    while True:
        at = ctypes.cast(rest, ctypes.c_void_p).value
        if at is not None and re.match(rb";(\s|$)", line.encode()[at - start :]):
            raise AssertionError(f"a second command begins in {line!r}")
        word = ctypes.c_void_p()
        code = shared.extract_first_word(ctypes.byref(rest), ctypes.byref(word), None, UNQUOTE_AND_UNESCAPE)
        assert code >= 0, (code, line)
        if code == 0:
            break
        words.append(ctypes.string_at(word.value or 0).decode())
        libc.free(word)
    for word in words:
        assert "%" not in word.replace("%%", ""), word
    words = [word.replace("%%", "%") for word in words]
    given = (ctypes.c_char_p * (len(words) + 1))(*(word.encode() for word in words), None)
    environment = (ctypes.c_char_p * 3)(b"HOME=/nowhere", b"A=several words", None)
    shared.replace_env_argv.restype = ctypes.POINTER(ctypes.c_char_p)
    return _strings(shared.replace_env_argv(given, environment), libc)


def _strings(found: "ctypes._Pointer[ctypes.c_char_p]", libc: ctypes.CDLL) -> list[str]:
    strings: list[str] = []
    while found and found[len(strings)] is not None:
        strings.append(found[len(strings)].decode())
    return strings
