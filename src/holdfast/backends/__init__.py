"""Where generation happens. Today: `embedded`, our own engine in this process."""
