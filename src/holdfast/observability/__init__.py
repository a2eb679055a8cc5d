"""Numbers and words about a running server."""
