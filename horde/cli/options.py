# SPDX-License-Identifier: AGPL-3.0-or-later
"""Options of a command that stand for settings of the environment."""

from collections.abc import Callable, Mapping

from horde.settings import ConfigError


def read_with_options[S](
    read: Callable[[Mapping[str, str]], S],
    environment: Mapping[str, str],
    options: Mapping[str, str | None],
) -> S:
    """The settings that ``read`` makes of the environment, with each option that was given over its
    variable: ``{"--port HORDE_PORT": "7001"}``. Raises ConfigError, which then names the option.
    """
    given, names = {}, {}
    for words, value in options.items():
        option, variable = words.split()
        if value is not None:
            given[variable], names[variable] = value, option
    try:
        return read({**environment, **given})
    except ConfigError as error:
        raise ConfigError(names.get(error.name, error.name), error.problem) from None
