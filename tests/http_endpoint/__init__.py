"""The HTTP endpoint over real sockets, by topic."""
