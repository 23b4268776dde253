"""The client: what an application imports."""

from __future__ import annotations

from tms_core.client.messages import Message
from tms_core.client.sync import Client, Messages
from tms_core.client.values import Limits, Retry, Timeouts

__all__ = ["Client", "Limits", "Message", "Messages", "Retry", "Timeouts"]
