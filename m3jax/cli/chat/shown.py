"""Text from elsewhere on a terminal."""

import unicodedata

# What would move the cursor, change colours, or turn the direction of writing; joiners of letters and emoji stay.
_OBEYED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_KEPT = frozenset("\n\t\u200c\u200d")


def visible(text: str) -> str:
    """The text with escapes in the place of what a terminal would obey; line ends, tabs and joiners stay.

    Args:
      text: any string; what a model wrote, say.
    """
    if text.isprintable():
        return text
    is_obeyed = lambda character: character not in _KEPT and unicodedata.category(character) in _OBEYED
    escape = lambda character: character.encode("unicode_escape").decode("ascii")
    return "".join(escape(character) if is_obeyed(character) else character for character in text)
