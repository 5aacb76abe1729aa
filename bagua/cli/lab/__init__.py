"""``bagua lab``: hosts with links of any speed, delay and loss, on one Linux machine."""

__all__: list[str] = []
