"""Topics of the product's own, which are in the store like everybody else's and must be told apart.

A name alone does not do: somebody may have had a topic of that name all along. So the topic carries a mark among its
properties, which CDAP keeps and hands on as it is. Whoever replaces the properties makes the topic theirs.
"""

from __future__ import annotations

from tms_core.topic import TopicId, TopicMetadata

#: The topic of the canary (``janitor.canary``).
CANARY_TOPIC = TopicId("system", "janitor_canary")

#: The property that says whose a topic is, and what it says of ours.
OWNER, OURS = "owner", "tms-janitor"


def is_own(topic: TopicMetadata) -> bool:
    """Whether a topic, deleted or not, was made by the janitor for itself."""
    return topic.topic == CANARY_TOPIC and topic.properties.get(OWNER) == OURS
