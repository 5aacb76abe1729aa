"""``bagua demo``: train a small language model on the text that every Python brings along."""

__all__: list[str] = []
