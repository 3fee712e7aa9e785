# SPDX-License-Identifier: AGPL-3.0-or-later
import subprocess
import sys

import pytest

from horde.config import Config
from horde.settings import ConfigError

COMPLETE = {
    "DATABASE_URL": "postgresql://user:word@host/name",
    "secret_key": "salt",
    "HORDE_OIDC_ISSUER": "https://login.example.org/",
    "HORDE_OIDC_CLIENT_ID": "a horde",
    "HORDE_OIDC_CLIENT_SECRET": "a-secret",
    "HORDE_URL": "https://horde.example.org",
}


def test_a_provider_with_all_it_needs_is_accepted() -> None:
    assert Config.from_environment(COMPLETE).oidc_issuer == "https://login.example.org"


@pytest.mark.parametrize("name", ["HORDE_OIDC_CLIENT_ID", "HORDE_OIDC_CLIENT_SECRET", "HORDE_URL"])
def test_a_provider_without_the_rest_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Config.from_environment({**COMPLETE, name: ""})


def test_the_secret_of_the_provider_is_not_shown() -> None:
    assert "a-secret" not in repr(Config.from_environment(COMPLETE))


def test_the_application_does_not_load_the_library_unasked() -> None:
    code = "import sys, horde.app; sys.exit('authlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
