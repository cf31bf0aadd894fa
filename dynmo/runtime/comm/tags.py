"""Tags of messages: numbers that keep messages between the same two ranks apart."""

from __future__ import annotations

from dynmo.schedule.lowering import Channel, Direction

# Message tags: channels use 2 * boundary + direction. Everything else is above. Headers have tags
# of their own. Messages of one tag fill the receives posted for it in order. The receives of
# headers are posted ahead of those of the tensors.
TAG_HEADERS = 1 << 19
TAG_LINKS = 1 << 20
TAG_MIGRATE = 1 << 21
TAG_TRACE = 1 << 22
TAG_TIED = 1 << 23
TAG_PREFIX = 1 << 24
TAG_VERDICT = 1 << 25


def tag_of(channel: Channel) -> int:
    """Returns the tag of a channel's messages."""
    return 2 * channel.boundary + (channel.direction is Direction.GRADIENT)


def key_of(channel: Channel) -> tuple[int, int, int]:
    """Returns the key of a channel's communicator: tag, source, target (`World.open_channels`)."""
    return (tag_of(channel), channel.source, channel.target)
