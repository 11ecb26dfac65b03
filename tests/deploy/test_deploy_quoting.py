"""Values and words come back from systemd as they were given."""

import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from a_deployment import made
from ddtree.deploy.quoting import command, environment_line, path
from ddtree.deploy.render import render
from ddtree.deploy.unit_file import read_environment as read_by_hand
from systemd_rules import LIBRARY, its_own_command, its_own_environment, read_command, read_environment

needs_systemd = pytest.mark.skipif(
    LIBRARY is None, reason="libsystemd-shared-252 is not installed: apt-get install systemd"
)

letters = st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"])
nasty = st.sampled_from([*"\"'\\$%`;#={}!*?~ \t\n", "\\n", "$HOME", "${A}", "%h", "%%", '\\"', "$$", "é", "漢"])
values = st.lists(st.one_of(nasty, letters), max_size=12).map("".join)
words = st.lists(st.one_of(nasty.filter(str.isprintable), letters.filter(str.isprintable)), min_size=1, max_size=8).map(
    "".join
)


@given(values=st.lists(values, max_size=5))
@example(
    values=["a b", "100%", "$HOME", 'say "hi"', "it's", "back\\slash\\", "a\nb", "#x", " ", "", "`id`", "\\$", "%h"]
)
def test_values_of_an_environment_file(values: list[str]) -> None:
    names = [f"V{place}" for place in range(len(values))]
    text = "# a comment\n" + "".join(f"{environment_line(*pair)}\n" for pair in zip(names, values, strict=True))
    assert read_environment(text) == dict(zip(names, values, strict=True))


@needs_systemd
@settings(max_examples=60, deadline=None)
@given(values=st.lists(values, min_size=1, max_size=5))
@example(
    values=["a b", "100%", "$HOME", 'say "hi"', "it's", "back\\slash\\", "a\nb", "#x", " ", "", "`id`", "\\$", "%h"]
)
def test_values_as_systemds_own_code_reads_them(tmp_path_factory: pytest.TempPathFactory, values: list[str]) -> None:
    deployment = made(environment={f"V{place}": value for place, value in enumerate(values)}, cpu_replicas=1)
    file = tmp_path_factory.mktemp("env") / "chat-0.env"
    file.write_text(render(deployment)["localhost/env/chat-0.env"], encoding="utf-8")
    assert its_own_environment(file) == dict(deployment.replicas()[0].environment)


# What people write into the file that `secrets` names; a comment's last backslash means different things by version.
HANDMADE = {
    "A=b c  \nB = 'x\\y' \n": {"A": "b c", "B": "x\\y"},
    'A="a"\'b\' c"d"\n': {"A": 'abc"d"'},
    'A=a\\b\\ \nB="a\\b\\"\\\nc"\n': {"A": "ab ", "B": 'a\\b"c'},
    "A=a\\\n  b\n# C=1\n;D=1\nexport E=1\nF\nG=#no\n1H=2\n=3\nA2=": {"A": "a  b", "G": "#no", "A2": ""},
    'A="never\nclosed': {"A": "never\nclosed"},
    "A=1\nA=2\n": {"A": "2"},
}
lines = st.lists(
    st.sampled_from(["A", "=", "B=", '"', "'", "\\", "\n", " ", "x", "$", ";", "\t", "`", '\nC="', "1"]), max_size=14
).map(lambda parts: "".join(parts).rstrip("\\"))


@pytest.mark.parametrize("text", HANDMADE)
def test_environment_files_that_people_write(text: str) -> None:
    assert read_by_hand(text) == HANDMADE[text]


@needs_systemd
@settings(max_examples=200, deadline=None)
@given(text=lines.filter(lambda text: not re.search(r"^[ \t]*;.*\\$", text, re.MULTILINE)))
def test_they_are_read_as_systemds_own_code_reads_them(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.mktemp("env") / "x.env"
    for written in (text, *HANDMADE):
        file.write_text(written, encoding="utf-8")
        assert read_by_hand(written) == its_own_environment(file)


@given(given=st.lists(words, max_size=6))
@example(given=[";", "a;", "$A", "${HOME}", "%h", "100%", '"', "'", "\\", "\\;", "a b", "#", "-x=$A", "@x", "$$"])
def test_words_of_a_command(given: list[str]) -> None:
    assert read_command(command(["/bin/x", *given])) == ["/bin/x", *given]


@needs_systemd
@settings(max_examples=60, deadline=None)
@given(given=st.lists(words, max_size=6))
@example(given=[";", "a;", "$A", "${HOME}", "%h", "100%", '"', "'", "\\", "\\;", "a b", "#", "-x=$A", "@x", "$$"])
def test_words_as_systemds_own_code_reads_them(given: list[str]) -> None:
    assert its_own_command(command(["/bin/x", *given])) == ["/bin/x", *given]


def test_homes_are_those_of_the_host() -> None:
    assert path("~/a b/100%") == "%h/a b/100%%"
    assert path("/srv/~/x") == "/srv/~/x"


@needs_systemd
def test_the_oracle_sees_what_is_wrong(tmp_path: Path) -> None:
    """So that the tests above can fail."""
    (tmp_path / "x.env").write_text('A="a\\"b"\nB=$HOME\nC=\'x\'\n')
    assert its_own_environment(tmp_path / "x.env") == {"A": 'a"b', "B": "$HOME", "C": "x"}
    assert its_own_command('/bin/x "a b" $A ${A} \\x41') == ["/bin/x", "a b", "several", "words", "several words", "A"]
    with pytest.raises(AssertionError, match="second command"):
        its_own_command("/bin/x ; /bin/y")
