"""``janitor advise`` where there is nothing to set."""

from __future__ import annotations

from tests.janitor.cli.conftest import Site


def test_given_leveldb_when_asked_for_advice_then_it_says_that_there_is_nothing_to_set(site: Site) -> None:
    assert site.run("advise").out.startswith("nothing to set: a LevelDB store has no such settings")
    assert site.run("advise --format json").json == {"tables": []}
