# SPDX-License-Identifier: AGPL-3.0-or-later
"""What the instruments of this process counted, read in memory."""

from functools import cache
from typing import Any

from opentelemetry.metrics import set_meter_provider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

type Attributes = frozenset[tuple[str, Any]]


@cache
def get_reader() -> InMemoryMetricReader:
    """The one reader of the process; the instruments come alive with the first call."""
    reader = InMemoryMetricReader()
    set_meter_provider(MeterProvider([reader]))
    return reader


def read_figures(name: str) -> dict[Attributes, float]:
    """Of each set of attributes, what a counter counted or how often a histogram was recorded."""
    data = get_reader().get_metrics_data()
    figures: dict[Attributes, float] = {}
    for resource in data.resource_metrics if data is not None else ():
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                if metric.name == name:
                    for point in metric.data.data_points:
                        value = getattr(point, "value", None)
                        attributes = frozenset((point.attributes or {}).items())
                        figures[attributes] = point.count if value is None else value
    return figures


class Counting:
    """What one instrument counts from here on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._before = read_figures(name)

    def read(self) -> list[tuple[dict[str, Any], float]]:
        """(attributes, what was added), for what moved."""
        now = read_figures(self._name)
        moved = (
            (attributes, value - self._before.get(attributes, 0))
            for attributes, value in now.items()
        )
        return [(dict(attributes), added) for attributes, added in moved if added]
