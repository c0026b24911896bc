"""What is said: an event as a message, and a message in the words of who receives it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from briter_worker.events import ConditionChanged, DeadLettered, Event, NoPaths, Published, Quarantined
from briter_worker.job import format_time
from briter_worker.sinks.log import entry
from briter_worker.sinks.webhooks.endpoints import CONDITION, DEAD_LETTERED, PUBLISHED

if TYPE_CHECKING:
    from collections.abc import Callable

_SHORT = 10
_MOST_TEXT = 1900
"""Discord takes 2,000 characters."""
_TYPES = {PUBLISHED: "post.published", DEAD_LETTERED: "post.dead-lettered", CONDITION: "site.condition"}
_LEFT_OUT = frozenset({"time", "level", "event"})


@dataclass(frozen=True, slots=True)
class Message:
    """One thing to be told, to however many. `id` is the same at each attempt to tell it."""

    id: str
    topic: str
    at: float
    data: dict[str, Any]

    @classmethod
    def of(
        cls, event: Event, at: float, href: Callable[[str], str | None], site: str | None = None
    ) -> Message | None:
        """The message that the event, of this site in a cluster, is worth; None for most events."""
        topic = topic_of(event)
        if topic is None:
            return None
        data = {key: value for key, value in entry(event, at, site).items() if key not in _LEFT_OUT}
        match event:
            case ConditionChanged():
                data = {"condition": None, "failure": None} | data
            case Published():
                data["href"] = href(event.slug)
            case NoPaths():
                data["failure"] = NoPaths.name
            case _:
                pass
        return cls(f"msg_{uuid4().hex}", topic, at, data)

    @property
    def text(self) -> str:
        """For people, one line."""
        data = self.data
        match self.topic:
            case "published":
                where = f" {data['href']}" if data.get("href") else ""
                how = "Would be published (dry run)" if data["dryRun"] else "Published"
                said = f"{how}: {data['slug']}{where} ({data['commit'][:_SHORT]})"
            case "dead-lettered":
                said = f"Not published: {data['slug']}: {data.get('error', '')}"
            case _ if data["condition"] is None:
                said = "Publishing works again"
            case _:
                said = f"Publishing is held up: {data['condition']}"
        whose = f"{data['site']}: " if data.get("site") else ""
        return f"{whose}{said}"[:_MOST_TEXT]


def topic_of(event: Event) -> str | None:
    """What the event is about, as endpoints choose; None when nobody is told of it."""
    match event:
        case Published():
            return PUBLISHED
        case DeadLettered() | NoPaths() | Quarantined():
            return DEAD_LETTERED
        case ConditionChanged():
            return CONDITION
        case _:
            return None


def as_json(message: Message) -> tuple[str, str]:
    """Content type and body, in the form of Standard Webhooks."""
    body = {"type": _TYPES[message.topic], "timestamp": format_time(message.at), "data": message.data}
    return "application/json", json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def _as_slack(message: Message) -> tuple[str, str]:
    # What stands between < and > would be a command, such as one that calls everybody.
    text = message.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "application/json", json.dumps({"text": text})


def _as_discord(message: Message) -> tuple[str, str]:
    return "application/json", json.dumps({"content": message.text, "allowed_mentions": {"parse": []}})


def _as_text(message: Message) -> tuple[str, str]:
    return "text/plain; charset=utf-8", f"{message.text}\n"


TEMPLATES: dict[str, Callable[[Message], tuple[str, str]]] = {
    "json": as_json,
    "slack": _as_slack,
    "discord": _as_discord,
    "text": _as_text,
}
