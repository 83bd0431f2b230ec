"""The framing of messages: bytes in, messages out."""

import pytest

from mpwatch.wire.messages import HEADER, FrameDecoder, MessageKind, encode_frame

BODIES = {MessageKind.READY: b"", MessageKind.RETURNED: b"x" * 1000, MessageKind.SHUTDOWN: b""}
STREAM = b"".join(encode_frame(kind, body, stamp=2.5) for kind, body in BODIES.items())


@pytest.mark.parametrize("size", [1, HEADER.size, HEADER.size + 1, len(STREAM)])
def test_messages_are_complete_whatever_the_pieces(size):
    frames = FrameDecoder()
    pieces = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    messages = [message for piece in pieces for message in frames.feed(piece)]
    assert [(message.kind, message.body, message.stamp) for message in messages] == [(*each, 2.5) for each in BODIES.items()]


def test_bytes_that_are_not_a_message_are_refused():
    frames = FrameDecoder()
    assert len(frames.feed(STREAM)) == len(BODIES)
    with pytest.raises(ValueError, match="not a message of mpwatch"):
        frames.feed(b"something else, and long enough")
