"""What ranks tell each other through a key-value store."""
