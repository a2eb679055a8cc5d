"""Stand-ins that pass the same contract suites as the real thing."""
