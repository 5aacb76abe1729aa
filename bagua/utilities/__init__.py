"""Helpers under the names by which users of other frameworks know them."""

__all__: list[str] = []
