"""Escapes for text of other origin (a model's, a user's file) before it is printed on a terminal."""

import unicodedata

# Categories that can move the cursor, change colours, or turn the direction of writing; joiners (of emoji) are kept.
_OBEYED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_KEPT = frozenset("\n\t\u200c\u200d")


def visible(text: str) -> str:
    """Return the text with escapes for all characters that a terminal would obey; line ends, tabs and joiners stay.

    Args:
      text: any string, such as the output of a model.
    """
    if text.isprintable():
        return text
    is_obeyed = lambda character: character not in _KEPT and unicodedata.category(character) in _OBEYED
    escape = lambda character: character.encode("unicode_escape").decode("ascii")
    return "".join(escape(character) if is_obeyed(character) else character for character in text)
