"""Makes texts of ranks harmless for a terminal, a log and UTF-8. Pure."""

import re

# They include surrogates, which UTF-8 cannot encode, line separators, and characters that reverse the direction of a text.
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
COLOR_SEQUENCES = re.compile(r"\x1b\[[0-9;:]*m")


def clean_text(raw: str) -> str:
    """Remove terminal color sequences from a text, and escape all control characters except line breaks and tabs."""
    plain = COLOR_SEQUENCES.sub("", str.__str__(raw))
    return CONTROL_CHARACTERS.sub(lambda found: found[0].encode("unicode_escape", "backslashreplace").decode(), plain)


def clean_line(raw: str) -> str:
    """Do the same, and also escape line breaks and tabs."""
    return clean_text(raw).replace("\n", "\\n").replace("\t", "\\t")
