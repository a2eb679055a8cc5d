"""The doors: wire <-> sessions, one error table each, one set of keys."""
