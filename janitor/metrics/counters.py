"""Counters: what the state has added up over all runs (``State.counters``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from janitor.metrics.catalogue import COUNTERS, PHASE_DURATION, PREFIX
from janitor.metrics.definition import Definition, Labels
from janitor.state.base import CounterKey


def families(counters: Mapping[CounterKey, float]) -> Iterator[Metric]:
    """Every counter of the catalogue; what else is in the state was written by a newer version and is left out."""
    for definition in COUNTERS:
        yield definition.family({"": _series(definition, "", counters)})
    yield PHASE_DURATION.family(
        {suffix: _series(PHASE_DURATION, suffix, counters) for suffix in ("_count", "_sum")},
    )


def _series(definition: Definition, suffix: str, counters: Mapping[CounterKey, float]) -> dict[Labels, float]:
    """A counter's values, those that are known beforehand and have not counted yet at 0."""
    name = definition.name.removeprefix(PREFIX) + suffix
    values = dict.fromkeys(definition.known or (), 0.0)
    for key, value in counters.items():
        given = dict(key.labels)
        if key.name == name and given.keys() == set(definition.labels):
            labels = tuple(given[label] for label in definition.labels)
            values[labels] = values.get(labels, 0.0) + value
    return values
