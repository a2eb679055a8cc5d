"""Benchmarks of the server and the engine, with gates that a run passes or fails."""
