"""bagua inside other frameworks. A missing package is an ImportError that names the extra."""

__all__: list[str] = []
