"""What one rank did: the record of its calls, and counters of them by communicator and in sum."""
