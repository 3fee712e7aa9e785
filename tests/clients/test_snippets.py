# SPDX-License-Identifier: AGPL-3.0-or-later
"""The examples of the how-to pages and the README, run as they are printed but for address, key and
model.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.acceptance._stack import ROOT
from tests.clients._worker import MODEL
from tests.clients.conftest import Stack

PAGE = ROOT / "docs" / "how-to" / "use-openai-clients.md"
ANTHROPIC_PAGE = ROOT / "docs" / "how-to" / "use-anthropic-clients.md"
OPERATORS_PAGE = ROOT / "docs" / "how-to" / "run-the-front.md"
PRINTED_ADDRESS = "http://127.0.0.1:7010"
SECONDS = 240


def list_blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of each fenced block that says its language."""
    return re.findall(r"^ *```(\w+)\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL)


def fill_in(text: str, stack: Stack) -> str:
    """The block with what a reader puts in."""
    text = text.replace(PRINTED_ADDRESS, stack.front.url)
    return re.sub(r"\bMODEL\b", MODEL, re.sub(r"\bKEY\b", stack.client.key, text))


BLOCKS = [
    *list_blocks(ROOT / "README.md"),
    *list_blocks(PAGE),
    # Its other shell examples start programs of their own, which have tests of their own.
    *[block for block in list_blocks(ANTHROPIC_PAGE) if block[0] != "sh" or "curl" in block[1]],
]


def run(command: list[str], text: str, stack: Stack, folder: Path) -> str:
    """What a program prints that reads its text from standard input."""
    environment = stack.build_environment()
    done = subprocess.run(
        command,
        input=text,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "number",
    range(len(BLOCKS)),
    ids=[f"{number}-{language}" for number, (language, _) in enumerate(BLOCKS)],
)
def test_every_example_for_clients_runs(
    number: int, stack: Stack, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    language, text = BLOCKS[number]
    text = fill_in(text, stack)
    if language == "sh":
        if shutil.which("curl") is None:
            pytest.skip("no curl")
        printed = run(["sh", "-e"], text, stack, tmp_path)
        assert '"object":"error"' not in printed
        assert '{"error"' not in printed
        assert '"type":"error"' not in printed
    elif language == "python" and "from anthropic" in text:
        printed = run([sys.executable, "-"], text, stack, tmp_path)
    elif language == "python":
        printed = run([str(request.getfixturevalue("client_python")), "-"], text, stack, tmp_path)
    else:
        assert language == "js"
        program, libraries = request.getfixturevalue("node")
        printed = run([str(program), "--input-type=module", "-"], text, stack, libraries)
    assert printed.strip()


def test_a_front_with_a_passkey_speaks_for_its_clients(stack: Stack) -> None:
    """The steps of the operators' page."""
    account = stack.horde.create_account("front")
    words = re.search(r"`horde (user role) ALIAS (\w+)`", OPERATORS_PAGE.read_text())
    assert words is not None
    stack.horde.commands.require(*words[1].split(), account.alias, words[2])
    (make_passkey,) = [
        text for language, text in list_blocks(OPERATORS_PAGE) if "generate_proxy_passkey" in text
    ]
    path, body = (
        re.search(r"7001/api/v2(/users/)NUMBER", make_passkey),
        re.search(r"-d '(.*)'", make_passkey),
    )
    assert path is not None
    assert body is not None
    headers = {"apikey": account.key, "Content-Type": "application/json"}
    answer = stack.horde.api.http.put(f"{path[1]}{account.id}", headers=headers, content=body[1])
    passkey = answer.json()["proxy_passkey"]
    proxied = {
        "Proxied-For": "192.0.2.7",
        "Proxy-Authorization": passkey,
        "apikey": stack.client.key,
    }
    assert httpx.get(f"{stack.horde.api.url}/v2/find_user", headers=proxied).status_code == 200


def test_the_operators_page_names_settings_and_figures_that_are_there() -> None:
    text = OPERATORS_PAGE.read_text() + (ROOT / "docker-compose.yml").read_text()
    settings = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    figures = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    assert [
        name for name in set(re.findall(r"HORDE_OAI_\w+", text)) if f"`{name}`" not in settings
    ] == []
    assert [
        name
        for name in set(re.findall(r"`(horde\.oai\.\w+)`", text)) - {"horde.oai.no_passkey"}
        if f"`{name}`" not in figures
    ] == []
