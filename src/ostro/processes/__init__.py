"""Child processes: how one is started over a socket pair, what it sees of our environment, how its log reaches us."""
