"""What was acknowledged is on disk: sessions, spans, turns, rewards, and the bytes of requests and replies."""
