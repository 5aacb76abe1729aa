"""What codecs share: bits of codes, rows of blocks, noise for rounding."""
