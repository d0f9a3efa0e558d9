"""Where two engines part: the first quantity between tokens and logits that differs (docs/compare.md)."""
