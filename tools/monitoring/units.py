"""Numbers in Grafana's format: three significant digits, and a unit that fits the size."""

from __future__ import annotations

from math import ceil, floor, log10

#: The units of time, with their lengths in seconds.
_TIMES = ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "mins"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
#: Each other unit: the factor between its prefixes, the prefixes, and the suffix.
_STEPS = {
    "bytes": (1024, ("B", "KiB", "MiB", "GiB", "TiB"), ""),
    "Bps": (1000, ("B", "kB", "MB", "GB", "TB"), "/s"),
    "rowsps": (1000, ("", "K", "M", "B", "T"), " rows/s"),
    "ops": (1000, ("", "K", "M", "B", "T"), " ops/s"),
    "reqps": (1000, ("", "K", "M", "B", "T"), " req/s"),
    "cps": (1000, ("", "K", "M", "B", "T"), " c/s"),
    "short": (1000, ("", "K", "Mil", "Bil", "Tri"), ""),
}


def scale(value: float, unit: str) -> tuple[float, str]:
    """Return the divisor for a number of this size, and the unit of the quotient.

    Args:
        value: the number in the unit.
        unit: Grafana's name of the unit: ``s``, ``percentunit``, ``bytes``, ``Bps``, ``rowsps``, ``ops``, ``reqps``,
            ``cps`` or ``short``.

    Raises:
        KeyError: the unit is unknown.
    """
    size = abs(value)
    if unit == "percentunit":
        return 0.01, "%"
    if unit == "s":
        by, name = next((found for found in _TIMES if size >= found[0]), _TIMES[-1] if size else (1.0, "s"))
        return by, f" {name}"
    base, names, suffix = _STEPS[unit]
    power = 0
    while size >= base ** (power + 1) and power + 1 < len(names):
        power += 1
    return float(base**power), f"{' ' if names[power] else ''}{names[power]}{suffix}"


def written(value: float, unit: str) -> str:
    """Return a number with its unit, with at least three digits."""
    by, suffix = scale(value, unit)
    quotient = value / by
    if quotient == 1 and suffix in (" days", " hours", " mins"):
        suffix = suffix.removesuffix("s")
    return f"{quotient:.0f}{suffix}" if abs(quotient) >= 100 else f"{float(f'{quotient:.3g}'):g}{suffix}"


def ticks(low: float, high: float, unit: str, most: int = 6) -> list[float]:
    """Return round numbers for the ticks of an axis that covers all values.

    Args:
        low: the smallest value.
        high: the largest value.
        unit: the unit of the values.
        most: the maximum number of steps.
    """
    by, _ = scale(max(abs(low), abs(high)), unit)
    high = high if high > low else low + by
    span = (high - low) / by
    power = 10.0 ** floor(log10(span / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * most >= span * 0.999)
    first, last = floor(low / by / step), ceil(high / by / step)
    return [at * step * by for at in range(first, max(last, first + 1) + 1)]
