"""From a process that was just started to a connected group: who else, on which hosts, over which transport."""
