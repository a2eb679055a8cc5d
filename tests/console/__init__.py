"""The web console in a real Chromium."""
